"""The part of a state that a rank has kept, and the memory file in which a keeper holds it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct, structs

from ft_transport.errors import ManifestError
from ft_transport.http.shared_memory import is_sealed
from ft_transport.wire.manifest import MAX_HEADER_BYTES, Manifest, decode_header
from ft_transport.wire.signing import Key
from ft_transport.wire.snapshot import MemoryFile, Snapshot

_PREFIX_BYTES: Final = 8
"""Length of the number at the beginning of a safetensors file, which is the length of its JSON header."""


class KeptPart(Struct, frozen=True, kw_only=True):
    """The part of a replica's state that one of its ranks has kept.

    Attributes:
        step: Committed step of the state.
        rank: The rank.
        num_ranks: Number of ranks of the replica.
        history: Name of the history of steps. After a restart or a rollback, the same step may have another state.
        twins: Ranks that have the data which is missing in this copy (``kept_copies``); empty if it is whole.
    """

    step: int
    rank: int = 0
    num_ranks: int = 1
    history: str = ""
    twins: tuple[int, ...] = ()

    def whole(self) -> KeptPart:
        """Return this part without holes."""
        return structs.replace(self, twins=())

    def of_rank(self, rank: int) -> KeptPart:
        """Return the whole part of a rank at the same step."""
        return structs.replace(self, rank=rank, twins=())

    def is_of_step(self, other: KeptPart) -> bool:
        """Return whether this and another part belong to the same state of a replica."""
        return self.of_rank(0) == other.of_rank(0)


class KeptFile(Struct, frozen=True, kw_only=True):
    """Describes a kept snapshot to a successor.

    Attributes:
        part: The state in it.
        start: Position of the safetensors file in the memory file.
        num_bytes: Length of the safetensors file.
    """

    part: KeptPart
    start: int
    num_bytes: int

    def encode(self) -> bytes:
        """Encode the description for the keeper."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> KeptFile | None:
        """Decode a description; ``None`` if another version of this package has encoded it."""
        try:
            return _decoder.decode(encoded)
        except msgspec.MsgspecError:
            return None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(KeptFile)


def open_part(descriptor: int, about: KeptFile, keys: Sequence[Key]) -> tuple[Snapshot, Manifest]:
    """Return the snapshot in a memory file, and its manifest. Closing the snapshot leaves the file to its owner.

    Raises:
        ManifestError: The file does not contain the described snapshot, or the snapshot is one of another job.
    """
    where = "the keeper of this host"
    size_bytes = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, _PREFIX_BYTES, about.start)
    header_bytes = _PREFIX_BYTES + int.from_bytes(prefix, "little")
    data_start = about.start + header_bytes
    is_inside = header_bytes <= min(about.num_bytes, _PREFIX_BYTES + MAX_HEADER_BYTES)
    if not is_inside or about.start + about.num_bytes > size_bytes or data_start % mmap.PAGESIZE:
        raise ManifestError(f"expected a snapshot of {about.num_bytes} bytes in a file of {size_bytes}", peer=where)
    if not is_sealed(descriptor):
        raise ManifestError("expected a memory file that nobody can change, got one without seals", peer=where)
    header = os.pread(descriptor, header_bytes, about.start)
    manifest = decode_header(memoryview(header)[_PREFIX_BYTES:], keys=keys, peer=where)
    if (manifest.step, manifest.total_bytes) != (about.part.step, about.num_bytes):
        raise ManifestError(
            f"expected a snapshot of step {about.part.step} with {about.num_bytes} bytes, got one of step "
            f"{manifest.step} with {manifest.total_bytes}",
            peer=where,
        )
    own = os.dup(descriptor)
    try:
        mapped = mmap.mmap(own, max(1, manifest.data_bytes), prot=mmap.PROT_READ, offset=data_start)
    except BaseException:
        os.close(own)
        raise
    snapshot = Snapshot(
        step=manifest.step,
        snapshot_id=manifest.snapshot_id,
        header=header,
        memory=MemoryFile(own, about.start, data_start, memoryview(mapped)[: manifest.data_bytes]),
        total_bytes=about.num_bytes,
        # The memory is unmapped with the last reference to it.
        close=partial(os.close, own),
        digester=manifest.digester,
    )
    return snapshot, manifest
