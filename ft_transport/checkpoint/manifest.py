"""What stands in the files of a checkpoint that describe it.

``manifest.json`` lists all other files with their sizes and digests; it is written last, and what it does not list does
not belong to the checkpoint. ``rank-K.json`` has, for each snapshot that rank K had, its safetensors header (see
``wire.manifest``) and where in that rank's data file the bytes of its tensors begin, of those that it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from ft_transport.checkpoint.hashing import CHECKSUM, SECURE_HASH, HashName, num_digits_of
from ft_transport.errors import CheckpointDamagedError, ManifestError
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import Manifest, decode_header
from ft_transport.wire.nodes import Count, DefaultDictNode, MappingNode

MANIFEST_NAME: Final = "manifest.json"
"""Written last; a directory without it is no checkpoint, whatever its name."""
FORMAT_VERSIONS: Final[dict[HashName, int]] = {CHECKSUM: 1, SECURE_HASH: 2}
"""By what the files are digested by: who knows the first alone refuses the second."""
CHUNK_BYTES: Final = 4 << 20
"""What is digested, read and sent at once."""
DATA_SUFFIX: Final = ".distcp"
NOT_HERE: Final = -1
"""Stands for the position of what another rank has written."""


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
        num_ranks: How many ranks wrote it.
        local_keys: Top-level keys of the state whose values each rank has for itself.
        files: All other files.
        hash: What the files are digested by.
        job: Name of the run that signed it.
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
    """What a rank had, and what it wrote: the part that all share, and the part of its own."""

    data_file: str
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """`RankFile`, decoded.

    Attributes:
        data_file: Name of its data file.
        manifests: Of the shared part, and of its own.
        positions: For each of them, where each entry begins in the data file.
    """

    data_file: str
    manifests: tuple[Manifest, ...]
    positions: tuple[tuple[int, ...], ...]

    def check_positions(self, num_bytes: int, *, name: str) -> None:
        """Refuses what lies outside of the data file: its chunks are numbered, and behind them are another's.

        Args:
            num_bytes: Length of the data file.
            name: Of the description.

        Raises:
            CheckpointDamagedError: Names the first tensor that does.
        """
        for manifest, positions in zip(self.manifests, self.positions, strict=True):
            for entry, position in zip(manifest.tensors, positions, strict=True):
                if position != NOT_HERE and not 0 <= position <= num_bytes - (entry.end - entry.start):
                    raise CheckpointDamagedError(
                        f"{name}: expected {entry.end - entry.start} bytes inside of {self.data_file}, which has "
                        f"{num_bytes}, got them at {position}",
                        files=(name,),
                        path=entry.name,
                    )


_encoder = msgspec.json.Encoder()
_sealed_decoder = msgspec.json.Decoder(_Sealed)
_manifest_decoder = msgspec.json.Decoder(CheckpointManifest)
_rank_decoder = msgspec.json.Decoder(RankFile)


def rank_file_name(rank: int) -> str:
    """Name of a rank's description."""
    return f"rank-{rank}.json"


def data_file_name(rank: int) -> str:
    """Name of a rank's data file, as DCP's writer names it."""
    return f"__{rank}_0{DATA_SUFFIX}"


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """A list of files, as it is sealed."""
    return _encoder.encode(manifest)


def decode_manifest(body: bytes, *, name: str) -> CheckpointManifest:
    """The inverse of `encode_manifest`.

    Raises:
        CheckpointDamagedError: It is not what was written, or of a newer format.
    """
    try:
        manifest = _manifest_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise CheckpointDamagedError(f"{name} is no list of files: {error}", files=(name,)) from error
    if manifest.format != FORMAT_VERSIONS[manifest.hash]:
        raise CheckpointDamagedError(
            f"expected format {FORMAT_VERSIONS[manifest.hash]} in {name}, got {manifest.format}", files=(name,)
        )
    if len({entry.name for entry in manifest.files}) != len(manifest.files):
        raise CheckpointDamagedError(f"expected each file once in {name}", files=(name,))
    for entry in manifest.files:
        if len(entry.digests) != num_chunks_of(entry.num_bytes) * num_digits_of(manifest.hash):
            raise CheckpointDamagedError(f"expected a digest of each chunk of {entry.name} in {name}", files=(name,))
    return manifest


def encode_sealed(body: bytes, signature: str) -> bytes:
    """The content of ``manifest.json``: a list of files with a digest of its own.

    Args:
        body: The list, encoded.
        signature: Of the list; empty for none.
    """
    return _encoder.encode(_Sealed(f"{digest(body):016x}", Raw(body), signature))


def decode_sealed(encoded: bytes, *, name: str) -> tuple[CheckpointManifest, bytes, str]:
    """The inverse of `encode_sealed`: the list, as it was encoded, and its signature, which is not verified here.

    Raises:
        CheckpointDamagedError: It is not what was written, or of a newer format.
    """
    try:
        sealed = _sealed_decoder.decode(encoded)
    except DECODE_ERRORS as error:
        raise CheckpointDamagedError(f"{name} is no list of files: {error}", files=(name,)) from error
    body = bytes(sealed.body)
    if f"{digest(body):016x}" != sealed.digest:
        raise CheckpointDamagedError(f"{name} differs from its own digest", files=(name,))
    return decode_manifest(body, name=name), body, sealed.signature


def encode_rank_file(data_file: str, headers: list[bytes], positions: list[list[int]]) -> bytes:
    """The content of a rank's description.

    Args:
        data_file: Name of its data file.
        headers: The JSON header of each snapshot.
        positions: As for `StoredPart`.
    """
    parts = [StoredPart(Raw(header.rstrip()), tuple(each)) for header, each in zip(headers, positions, strict=True)]
    return _encoder.encode(RankFile(data_file=data_file, parts=tuple(parts)))


def decode_rank_file(encoded: bytes, *, name: str) -> StoredRank:
    """The inverse of `encode_rank_file`.

    Raises:
        CheckpointDamagedError: It is something else.
    """
    try:
        file = _rank_decoder.decode(encoded)
    except DECODE_ERRORS as error:
        raise CheckpointDamagedError(f"{name} is no description of a rank's state: {error}", files=(name,)) from error
    try:
        manifests = tuple(decode_header(bytes(part.header), peer=name) for part in file.parts)
    except ManifestError as error:
        raise CheckpointDamagedError(f"{name}: {error.message}", files=(name,)) from error
    for manifest, part in zip(manifests, file.parts, strict=True):
        if not isinstance(manifest.tree, (MappingNode, DefaultDictNode)):
            raise CheckpointDamagedError(f"{name}: expected a state that is a dict", files=(name,))
        if len(part.positions) != len(manifest.tensors):
            raise CheckpointDamagedError(f"expected a position for each tensor in {name}", files=(name,))
    return StoredRank(
        data_file=file.data_file, manifests=manifests, positions=tuple(part.positions for part in file.parts)
    )


def num_chunks_of(num_bytes: int) -> int:
    """How many digests a file has."""
    return -(-num_bytes // CHUNK_BYTES)


def file_entry(name: str, num_bytes: int, digests: Sequence[str]) -> FileEntry:
    """The entry of a file with these digests."""
    return FileEntry(name, num_bytes, "".join(digests))


def digest_of(entry: FileEntry, chunk: int, hash_name: HashName) -> str:
    """The digest of a chunk of a file."""
    num_digits = num_digits_of(hash_name)
    return entry.digests[chunk * num_digits : (chunk + 1) * num_digits]
