"""The list of a checkpoint's files: its format, the hash functions of its digests, and its signature.

``manifest.json`` lists all other files with their sizes and digests; it is written last, and files that it does not
list are not part of the checkpoint. ``rank-K.json`` has, for each snapshot of rank K, its safetensors header (see
``wire.manifest``), and the offsets in that rank's data file of the tensors that the rank wrote.

A checksum detects bits that a disk or a memory module has changed, at the speed of memory. Another file with the same
checksum is easy to make, so a signed list of files uses SHA-256 (FIPS 180-4), of which one core computes 1 to 2 GB/s.
With a job token, only checkpoints that were signed with it are loaded. The signature covers the list: a digest of every
chunk of every other file, the step, and the name of the job. So files of another checkpoint do not fit, nor does the
list of another step. An earlier checkpoint of the same step and job fits: an attacker with a copy could restore it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Raw, Struct

from ft_transport.errors import CheckpointDamagedError, CheckpointUntrustedError, ManifestError
from ft_transport.keys import Keys
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import Manifest, decode_header
from ft_transport.wire.nodes import Count, DefaultDictNode, MappingNode

T = TypeVar("T")

HashName: TypeAlias = Literal["xxh3-64", "sha256"]

CHECKSUM: Final[HashName] = "xxh3-64"
SECURE_HASH: Final[HashName] = "sha256"


HASHES: Final[dict[HashName, Callable[[], Any]]] = {CHECKSUM: xxhash.xxh3_64, SECURE_HASH: hashlib.sha256}
"""Constructors; ``update`` of a hash releases the GIL for large buffers."""
_NUM_DIGITS: Final[dict[HashName, int]] = {CHECKSUM: 16, SECURE_HASH: 64}


def hash_of(name: HashName, data: bytes | memoryview) -> str:
    """Return the digest of some bytes, in hexadecimal digits."""
    running = HASHES[name]()
    running.update(data)
    digits: str = running.hexdigest()
    return digits


MANIFEST_NAME: Final = "manifest.json"
"""Written last; a directory without it is no checkpoint, even if it has the name of one."""
FORMAT_VERSIONS: Final[dict[HashName, int]] = {CHECKSUM: 1, SECURE_HASH: 2}
"""By hash function of the files: software that knows only the first version refuses the second."""
CHUNK_BYTES: Final = 4 << 20
"""Unit of digests, reads and messages."""
DATA_SUFFIX: Final = ".distcp"
NOT_HERE: Final = -1
"""Position of an entry that another rank has written."""


class FileEntry(Struct, frozen=True):
    """A file: its name, its length, and the digest of each `CHUNK_BYTES` of it, in hexadecimal digits."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]+\Z", max_length=255)]
    num_bytes: Count
    digests: Annotated[str, Meta(pattern=r"\A[0-9a-f]*\Z")]


class CheckpointManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The list of files.

    Attributes:
        format: Version of this format.
        step: The committed step.
        num_ranks: Number of ranks that wrote the checkpoint.
        local_keys: Top-level keys of the state whose values are rank-local.
        files: All other files.
        hash: Hash function of the files' digests.
        job: Name of the run that signed the list.
    """

    format: int
    step: Count
    num_ranks: Annotated[int, Meta(ge=1)]
    local_keys: tuple[str, ...]
    files: tuple[FileEntry, ...]
    hash: HashName = CHECKSUM
    job: str = ""


class _Sealed(Struct, frozen=True, omit_defaults=True):
    digest: str
    body: Raw
    signature: Annotated[str, Meta(max_length=200)] = ""


class StoredPart(Struct, frozen=True):
    """One snapshot of a rank: its header as JSON, and the position of each entry of its table, or `NOT_HERE`."""

    header: Raw
    positions: tuple[int, ...]


class RankFile(Struct, frozen=True, kw_only=True):
    """The snapshots of a rank, shared and rank-local part, and the places of the entries that the rank wrote."""

    data_file: str
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """`RankFile`, decoded.

    Attributes:
        data_file: Name of its data file.
        manifests: Manifests of the shared part and of the rank-local part.
        positions: For each manifest, the offset of each entry in the data file.
    """

    data_file: str
    manifests: tuple[Manifest, ...]
    positions: tuple[tuple[int, ...], ...]

    def check_positions(self, num_bytes: int, *, name: str) -> None:
        """Refuse positions outside of the data file: chunks are numbered across files, so they would mean another file.

        Args:
            num_bytes: Length of the data file.
            name: Name of the description.

        Raises:
            CheckpointDamagedError: Names the first tensor outside of the file.
        """
        for manifest, positions in zip(self.manifests, self.positions, strict=True):
            for entry, position in zip(manifest.tensors, positions, strict=True):
                if position != NOT_HERE and not 0 <= position <= num_bytes - (entry.end - entry.start):
                    raise damaged(
                        name,
                        f"expected {entry.end - entry.start} bytes inside of {self.data_file}, which has {num_bytes}, "
                        f"got them at {position}",
                        entry.name,
                    )


_encoder = msgspec.json.Encoder()
_sealed_decoder = msgspec.json.Decoder(_Sealed)
_manifest_decoder = msgspec.json.Decoder(CheckpointManifest)
_rank_decoder = msgspec.json.Decoder(RankFile)


def damaged(name: str, what: str, path: str | None = None) -> CheckpointDamagedError:
    """Return the error that names a file and its damage."""
    return CheckpointDamagedError(f"{name}: {what}", files=(name,), path=path)


def _decoded(decoder: msgspec.json.Decoder[T], encoded: bytes, name: str, what: str) -> T:
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        raise damaged(name, f"it is no {what}: {error}") from error


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's description."""
    return f"rank-{rank}.json"


def data_file_name(rank: int) -> str:
    """Return the name of a rank's data file, as DCP's writer names it."""
    return f"__{rank}_0{DATA_SUFFIX}"


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Encode a list of files, as input of the seal."""
    return _encoder.encode(manifest)


def decode_manifest(body: bytes, *, name: str) -> CheckpointManifest:
    """Decode a list of files; the inverse of `encode_manifest`.

    Raises:
        CheckpointDamagedError: The list was changed, or has a newer format.
    """
    manifest = _decoded(_manifest_decoder, body, name, "list of files")
    if manifest.format != FORMAT_VERSIONS[manifest.hash]:
        raise damaged(name, f"expected format {FORMAT_VERSIONS[manifest.hash]}, got {manifest.format}")
    if len({entry.name for entry in manifest.files}) != len(manifest.files):
        raise damaged(name, "expected each file once")
    for entry in manifest.files:
        if len(entry.digests) != num_chunks_of(entry.num_bytes) * _NUM_DIGITS[manifest.hash]:
            raise damaged(name, f"expected a digest of each chunk of {entry.name}")
    return manifest


def encode_sealed(body: bytes, signature: str) -> bytes:
    """Return the content of ``manifest.json``: a list of files with a digest of its own.

    Args:
        body: The list, encoded.
        signature: Signature of the list; empty for none.
    """
    return _encoder.encode(_Sealed(f"{digest(body):016x}", Raw(body), signature))


def decode_sealed(encoded: bytes, *, name: str) -> tuple[CheckpointManifest, bytes, str]:
    """Return the list, decoded and encoded, and its signature, which is not verified here; inverts `encode_sealed`.

    Raises:
        CheckpointDamagedError: The list was changed, or has a newer format.
    """
    sealed = _decoded(_sealed_decoder, encoded, name, "list of files")
    body = bytes(sealed.body)
    if f"{digest(body):016x}" != sealed.digest:
        raise damaged(name, "it differs from its own digest")
    return decode_manifest(body, name=name), body, sealed.signature


def encode_rank_file(data_file: str, headers: list[bytes], positions: list[list[int]]) -> bytes:
    """Return the content of a rank's description.

    Args:
        data_file: Name of its data file.
        headers: The JSON header of each snapshot.
        positions: As for `StoredPart`.
    """
    parts = [StoredPart(Raw(header.rstrip()), tuple(each)) for header, each in zip(headers, positions, strict=True)]
    return _encoder.encode(RankFile(data_file=data_file, parts=tuple(parts)))


def decode_rank_file(encoded: bytes, *, name: str) -> StoredRank:
    """Decode a rank's description; the inverse of `encode_rank_file`.

    Raises:
        CheckpointDamagedError: The content is no such description.
    """
    file = _decoded(_rank_decoder, encoded, name, "description of a rank's state")
    try:
        manifests = tuple(decode_header(bytes(part.header), peer=name) for part in file.parts)
    except ManifestError as error:
        raise damaged(name, error.message) from error
    for manifest, part in zip(manifests, file.parts, strict=True):
        if not isinstance(manifest.tree, (MappingNode, DefaultDictNode)):
            raise damaged(name, "expected a state that is a dict")
        if len(part.positions) != len(manifest.tensors):
            raise damaged(name, "expected a position for each tensor")
    return StoredRank(
        data_file=file.data_file, manifests=manifests, positions=tuple(part.positions for part in file.parts)
    )


def num_chunks_of(num_bytes: int) -> int:
    """Return the number of digests of a file."""
    return -(-num_bytes // CHUNK_BYTES)


def digest_of(entry: FileEntry, chunk: int, hash_name: HashName) -> str:
    """Return the digest of a chunk of a file."""
    num_digits = _NUM_DIGITS[hash_name]
    return entry.digests[chunk * num_digits : (chunk + 1) * num_digits]


_PURPOSE: Final = "checkpoint/list of files"


@dataclass(frozen=True, slots=True)
class Trust:
    """Signs the lists of files, and decides which are trusted.

    Attributes:
        keys: Keys of the job token; ``None`` signs nothing, and trusts every list.
        job: Name of the run that saves the checkpoints.
        accepts_unsigned: Whether unsigned lists are trusted.
    """

    keys: Keys | None
    job: str
    accepts_unsigned: bool

    @property
    def hash_name(self) -> HashName:
        """The hash function that new files have to use."""
        return CHECKSUM if self.keys is None else SECURE_HASH

    def seal(self, body: bytes) -> bytes:
        """Return the content of ``manifest.json``: a list of files, with its signature."""
        return encode_sealed(body, self.keys.sign(_PURPOSE, body) if self.keys is not None else "")

    def open(self, encoded: bytes, *, name: str) -> CheckpointManifest:
        """Return the list of files; the inverse of `seal`.

        Args:
            encoded: Content of the file.
            name: Name of the file.

        Raises:
            CheckpointDamagedError: The content was changed, or has a newer format.
            CheckpointUntrustedError: The list is unsigned, or signed with another key, or for another job.
        """
        manifest, body, signature = decode_sealed(encoded, name=name)
        if self.keys is None:
            return manifest
        if not signature:
            if self.accepts_unsigned:
                return manifest
            raise CheckpointUntrustedError(
                f"expected {name} to be signed with the job token, it has no signature; if it was saved without a "
                "token by a run that you trust, load it with accept_unsigned=True",
                step=manifest.step,
            )
        if not self.keys.verifies(signature, _PURPOSE, body):
            key_id = signature.partition(":")[0][:16]
            known = ", ".join(key.key_id for key in self.keys.current())
            why = "the signature is not of this content" if self.keys.with_id(key_id) else f"the keys here are {known}"
            raise CheckpointUntrustedError(
                f"expected {name} to be signed with the job token, it is signed with key {key_id!r}, and {why}",
                step=manifest.step,
            )
        if manifest.hash != SECURE_HASH:
            raise CheckpointUntrustedError(
                f"expected {name} to have digests that nobody can forge, it has {manifest.hash}", step=manifest.step
            )
        if manifest.job != self.job:
            raise CheckpointUntrustedError(
                f"expected {name} of the job {self.job!r}, it is signed for the job {manifest.job[:80]!r}",
                step=manifest.step,
            )
        return manifest
