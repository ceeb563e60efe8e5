"""The formats of ``manifest.json`` (the list of files) and ``rank-K.json``, the digests, and the signature.

``manifest.json`` lists all other files with their lengths and digests. It is written last. Files that it does not list
are not part of the checkpoint. ``rank-K.json`` describes the state of rank K: the safetensors header of each snapshot
(see ``wire.manifest``), and the data file and offset of each tensor that rank K wrote. A rank has several data files if
it shares some of them with the previous checkpoint (``shared_files``).

Without a job token, digests are checksums (xxh3), computed at the speed of memory. They detect bits that a disk or a
memory module has changed, but not a forgery. With a job token, digests are SHA-256 (FIPS 180-4; 1 to 2 GB/s per core),
the list of files is signed, and only lists signed with that token are loaded. The signature covers the step, the name
of the job, and the digest of every chunk of every other file. Not detected: an older checkpoint of the same step and
job that an attacker has copied and puts back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Raw, Struct

from ft_transport.credentials import Keys
from ft_transport.errors import CheckpointDamagedError, CheckpointUntrustedError, ManifestError
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import Manifest, decode_header
from ft_transport.wire.nodes import Count, DefaultDictNode, MappingNode

T = TypeVar("T")

HashName: TypeAlias = Literal["xxh3-64", "sha256"]

CHECKSUM: Final[HashName] = "xxh3-64"
SECURE_HASH: Final[HashName] = "sha256"


HASHES: Final[dict[HashName, Callable[[], Any]]] = {CHECKSUM: xxhash.xxh3_64, SECURE_HASH: hashlib.sha256}
"""Constructor of each hash function. The method ``update`` of a hash releases the GIL for large buffers."""
_NUM_DIGITS: Final[dict[HashName, int]] = {CHECKSUM: 16, SECURE_HASH: 64}


def hash_of(name: HashName, data: bytes | memoryview) -> str:
    """Return the digest of ``data``, in hexadecimal digits."""
    running = HASHES[name]()
    running.update(data)
    digits: str = running.hexdigest()
    return digits


MANIFEST_NAME: Final = "manifest.json"
"""Name of the list of files, which is written last. A directory without it is not a checkpoint."""
FORMAT_VERSIONS: Final[dict[HashName, int]] = {CHECKSUM: 3, SECURE_HASH: 4}
"""Version of the format, by hash function. Software that knows only older versions refuses it."""
_OLDER_VERSIONS: Final[dict[HashName, int]] = {CHECKSUM: 1, SECURE_HASH: 2}
"""Versions in which each rank has one data file; still readable."""
CHUNK_BYTES: Final = 4 << 20
"""Size of a chunk, the unit in which files are digested, read and sent."""
DATA_SUFFIX: Final = ".distcp"
NOT_HERE: Final = -1
"""Position of a tensor that another rank wrote."""


_FILE_NAME: Final = r"\A(?!\.{1,2}\Z)[A-Za-z0-9_.-]+\Z"
_MAX_NAME_LENGTH: Final = 255


def is_file_name(name: str) -> bool:
    """Return whether a list of files may contain this name."""
    return len(name) <= _MAX_NAME_LENGTH and re.search(_FILE_NAME, name) is not None


class FileEntry(Struct, frozen=True):
    """A file in the list of files.

    Attributes:
        name: Name of the file, without a directory.
        num_bytes: Length of the file.
        digests: Digests of the file's chunks (`CHUNK_BYTES` each), in hexadecimal digits, one after the other.
    """

    name: Annotated[str, Meta(pattern=_FILE_NAME, max_length=_MAX_NAME_LENGTH)]
    num_bytes: Count
    digests: Annotated[str, Meta(pattern=r"\A[0-9a-f]*\Z")]


class CheckpointManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The list of files of a checkpoint.

    Attributes:
        format: Version of this format.
        step: The step of the checkpoint.
        num_ranks: Number of ranks that wrote the checkpoint.
        local_keys: Top-level keys of the state whose values are rank-local.
        files: All files of the checkpoint except ``manifest.json``.
        hash: Hash function of the digests.
        job: Name of the run that signed the list; empty without a signature.
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


class StoredPart(Struct, frozen=True, omit_defaults=True):
    """The shared or the rank-local part of a rank's state.

    Attributes:
        header: The safetensors header of the part's snapshot, as JSON.
        positions: The offset of each tensor of the header in its data file, or `NOT_HERE`.
        files: For each tensor, the index of its file in ``RankFile.data_files``. Empty if it is 0 for all tensors.
    """

    header: Raw
    positions: tuple[int, ...]
    files: tuple[int, ...] = ()


class RankFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of ``rank-K.json``.

    Attributes:
        parts: The shared part and, if the state has one, the rank-local part.
        data_files: Names of the rank's data files.
        data_file: Name of the only data file in formats 1 and 2; empty in later ones.
    """

    parts: tuple[StoredPart, ...]
    data_files: tuple[str, ...] = ()
    data_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """The content of ``rank-K.json``, with decoded headers.

    Attributes:
        data_files: Names of the rank's data files.
        manifests: Manifests of the shared part and of the rank-local part.
        positions: For each manifest, the offset of each tensor in its data file, or `NOT_HERE`.
        files: For each manifest, the index in ``data_files`` of each tensor's data file.
    """

    data_files: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    positions: tuple[tuple[int, ...], ...]
    files: tuple[tuple[int, ...], ...]

    def check_positions(self, lengths: Sequence[int], *, name: str) -> None:
        """Check that each tensor lies inside its data file.

        `DataFiles` counts the chunks of all files together, so a position outside this file would be in another file.

        Args:
            lengths: Length of each data file.
            name: Name of the file ``rank-K.json``, for the error.

        Raises:
            CheckpointDamagedError: A tensor lies outside its file; ``path`` names the tensor.
        """
        for manifest, positions, files in zip(self.manifests, self.positions, self.files, strict=True):
            for entry, position, file in zip(manifest.tensors, positions, files, strict=True):
                if not 0 <= file < len(lengths):
                    raise damaged(name, f"expected one of {len(lengths)} data files, got number {file}", entry.name)
                if position != NOT_HERE and not 0 <= position <= lengths[file] - (entry.end - entry.start):
                    raise damaged(
                        name,
                        f"expected {entry.end - entry.start} bytes inside {self.data_files[file]}, which has "
                        f"{lengths[file]} bytes, got position {position}",
                        entry.name,
                    )


_encoder = msgspec.json.Encoder()
_sealed_decoder = msgspec.json.Decoder(_Sealed)
_manifest_decoder = msgspec.json.Decoder(CheckpointManifest)
_rank_decoder = msgspec.json.Decoder(RankFile)


def damaged(name: str, what: str, path: str | None = None) -> CheckpointDamagedError:
    """Return a `CheckpointDamagedError` about one file."""
    return CheckpointDamagedError(f"{name}: {what}", files=(name,), path=path)


def _decoded(decoder: msgspec.json.Decoder[T], encoded: bytes, name: str, what: str) -> T:
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        raise damaged(name, f"expected a {what}: {error}") from error


def rank_file_name(rank: int) -> str:
    """Return the name of the file that describes a rank's state."""
    return f"rank-{rank}.json"


def data_file_name(rank: int, number: int = 0) -> str:
    """Return the name of a data file of a rank. DCP's writer uses the same names."""
    return f"__{rank}_{number}{DATA_SUFFIX}"


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Encode a list of files. `encode_sealed` adds its digest and signature."""
    return _encoder.encode(manifest)


def decode_manifest(body: bytes, *, name: str) -> CheckpointManifest:
    """Decode and check a list of files; the inverse of `encode_manifest`.

    Raises:
        CheckpointDamagedError: The list is invalid, or has a newer format.
    """
    manifest = _decoded(_manifest_decoder, body, name, "list of files")
    if manifest.format not in (FORMAT_VERSIONS[manifest.hash], _OLDER_VERSIONS[manifest.hash]):
        raise damaged(name, f"expected format {FORMAT_VERSIONS[manifest.hash]}, got {manifest.format}")
    if len({entry.name for entry in manifest.files}) != len(manifest.files):
        raise damaged(name, "expected each file once in the list, got a file twice")
    for entry in manifest.files:
        if len(entry.digests) != num_chunks_of(entry.num_bytes) * _NUM_DIGITS[manifest.hash]:
            raise damaged(name, f"expected a digest of each chunk of {entry.name}")
    return manifest


def encode_sealed(body: bytes, signature: str) -> bytes:
    """Return the content of ``manifest.json``: a list of files, with the digest and the signature of this list.

    Args:
        body: The encoded list of files.
        signature: Signature of ``body``; empty if the list is not signed.
    """
    return _encoder.encode(_Sealed(f"{digest(body):016x}", Raw(body), signature))


def decode_sealed(encoded: bytes, *, name: str) -> tuple[CheckpointManifest, bytes, str]:
    """Decode ``manifest.json``, and compare the list of files with its digest. Does not verify the signature.

    Returns:
        The decoded list of files, the encoded list, and its signature.

    Raises:
        CheckpointDamagedError: The content was changed, is invalid, or has a newer format.
    """
    sealed = _decoded(_sealed_decoder, encoded, name, "list of files")
    body = bytes(sealed.body)
    if f"{digest(body):016x}" != sealed.digest:
        raise damaged(name, "the list of files differs from its own digest")
    return decode_manifest(body, name=name), body, sealed.signature


def encode_rank_file(
    data_files: Sequence[str],
    headers: Sequence[bytes],
    positions: Sequence[Sequence[int]],
    files: Sequence[Sequence[int]],
) -> bytes:
    """Return the content of ``rank-K.json``.

    Args:
        data_files: Names of the rank's data files.
        headers: The safetensors header of each part, as JSON.
        positions: For each part, the offset of each tensor in its data file, or `NOT_HERE`.
        files: For each part, the index in ``data_files`` of each tensor's data file.
    """
    parts = [
        StoredPart(Raw(header.rstrip()), tuple(each), tuple(numbers) if any(numbers) else ())
        for header, each, numbers in zip(headers, positions, files, strict=True)
    ]
    return _encoder.encode(RankFile(data_files=tuple(data_files), parts=tuple(parts)))


def decode_rank_file(encoded: bytes, *, name: str) -> StoredRank:
    """Decode and check the content of ``rank-K.json``; the inverse of `encode_rank_file`.

    Raises:
        CheckpointDamagedError: The content is invalid.
    """
    file = _decoded(_rank_decoder, encoded, name, "description of a rank's state")
    try:
        manifests = tuple(decode_header(bytes(part.header), peer=name) for part in file.parts)
    except ManifestError as error:
        raise damaged(name, error.message) from error
    for manifest, part in zip(manifests, file.parts, strict=True):
        if not isinstance(manifest.tree, (MappingNode, DefaultDictNode)):
            raise damaged(name, "expected a dict as state")
        if len(part.positions) != len(manifest.tensors):
            raise damaged(name, "expected a position for each tensor")
        if part.files and len(part.files) != len(manifest.tensors):
            raise damaged(name, "expected a data file for each tensor")
    return StoredRank(
        data_files=file.data_files or (file.data_file,),
        manifests=manifests,
        positions=tuple(part.positions for part in file.parts),
        files=tuple(part.files or (0,) * len(part.positions) for part in file.parts),
    )


def num_chunks_of(num_bytes: int) -> int:
    """Return the number of chunks of a file."""
    return -(-num_bytes // CHUNK_BYTES)


def digest_of(entry: FileEntry, chunk: int, hash_name: HashName) -> str:
    """Return the digest of one chunk of a file."""
    num_digits = _NUM_DIGITS[hash_name]
    return entry.digests[chunk * num_digits : (chunk + 1) * num_digits]


_PURPOSE: Final = "checkpoint/list of files"


@dataclass(frozen=True, slots=True)
class Trust:
    """Signs new lists of files, and verifies the signatures of loaded lists.

    Attributes:
        keys: Keys of the job token. With ``None``, nothing is signed, and every list is accepted.
        job: Name of the run, which a signed list must have.
        accepts_unsigned: Whether lists without a signature are accepted.
    """

    keys: Keys | None
    job: str
    accepts_unsigned: bool

    @property
    def hash_name(self) -> HashName:
        """The hash function for the digests of new files."""
        return CHECKSUM if self.keys is None else SECURE_HASH

    def seal(self, body: bytes) -> bytes:
        """Sign an encoded list of files, and return the content of ``manifest.json``."""
        return encode_sealed(body, self.keys.sign(_PURPOSE, body) if self.keys is not None else "")

    def open(self, encoded: bytes, *, name: str) -> CheckpointManifest:
        """Verify the content of ``manifest.json``, and return the list of files; the inverse of `seal`.

        Args:
            encoded: Content of the file.
            name: Name of the file, for errors.

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
            why = "the content has changed since" if self.keys.with_id(key_id) else f"the keys here are {known}"
            raise CheckpointUntrustedError(
                f"expected {name} to be signed with the job token, it is signed with key {key_id!r}, and {why}",
                step=manifest.step,
            )
        if manifest.hash != SECURE_HASH:
            raise CheckpointUntrustedError(
                f"expected {name} to have {SECURE_HASH} digests, because it is signed; it has {manifest.hash}",
                step=manifest.step,
            )
        if manifest.job != self.job:
            raise CheckpointUntrustedError(
                f"expected {name} to be signed for the job {self.job!r}, it is signed for {manifest.job[:80]!r}",
                step=manifest.step,
            )
        return manifest
