"""Snapshots of this process's state that outlive the process: its keeper holds them for the restarted process.

A kept snapshot is an ordinary snapshot, whose arena is a memory file. The keeper (``ft_transport.keeper``) receives a
descriptor of that file, so keeping copies no bytes. After the death of this process, the restarted process (the
successor) receives the descriptors from the keeper, and its own server serves the snapshots to it. So a kept snapshot
is verified, checked and loaded like that of a peer.

The trainer writes a new snapshot into the memory of an old one. It tells the keeper first, and the keeper reads that
message even if the trainer dies at once. So the keeper never offers a snapshot that is partly overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from ft_transport.credentials import Keys
from ft_transport.errors import ManifestError, SnapshotError
from ft_transport.http.shared_memory import is_sealed
from ft_transport.keeper.messages import Attend
from ft_transport.keeper.predecessor import Predecessor, find_predecessor
from ft_transport.keeper.process import keeper
from ft_transport.keeper.program import HOLDING
from ft_transport.settings import default_num_threads
from ft_transport.state.snapshot import PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.transfer.server import StateServer
from ft_transport.wire.chunks import CHUNK_BYTES, PLAIN, Digester
from ft_transport.wire.manifest import MAX_HEADER_BYTES, decode_header
from ft_transport.wire.signing import Key
from ft_transport.wire.snapshot import MemoryFile, Snapshot

logger = logging.getLogger(__name__)

HELD_S: Final = 600.0
"""How long a keeper holds the state of a dead trainer, in seconds. A restart on the same host takes less, as a rule."""
_MAX_KEPT: Final = 2
_PURPOSE: Final = "kept snapshots"
_PREFIX_BYTES: Final = 8
"""Length of the number at the beginning of a safetensors file, which is the length of its JSON header."""


class _About(Struct, frozen=True, kw_only=True):
    """Describes a kept snapshot to a successor.

    Attributes:
        step: Committed step of the state.
        start: Position of the safetensors file in the memory file.
        num_bytes: Length of the safetensors file.
    """

    step: int
    start: int
    num_bytes: int


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_About)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A kept snapshot: one of this process, or one of its predecessor.

    Attributes:
        number: Identifies the snapshot to the keeper.
        about: Describes the snapshot.
        descriptor: Descriptor of the memory file.
        close: Function that frees the memory.
    """

    number: int
    about: _About
    descriptor: int
    close: Callable[[], None]


class KeptSnapshots:
    """The kept snapshots of one process: at most two, its own or those of its predecessor.

    Only one thread at a time may call the methods.

    Args:
        server: Serves the snapshots of the predecessor to this process.
        keys: Keys of the job token. A successor must know one of them. ``None`` without a token.
    """

    def __init__(self, server: StateServer, keys: Keys | None) -> None:
        self._address = ""
        self._name = ""
        self._server = server
        self._keys = keys
        self._stager = Stager(
            max_snapshots=_MAX_KEPT, num_threads=default_num_threads(), chunk_bytes=CHUNK_BYTES, is_patient=True
        )
        self._kept: list[_Kept] = []
        self._num_kept = 0
        self._is_attended = False
        self._is_refused = False

    def open(self, address: str) -> None:
        """Take over the snapshots that the keeper of this process's predecessor holds, if there is one.

        From now on this process's own keeper holds them. Until then the predecessor's keeper does, so that they survive
        the death of this process at any time.

        Args:
            address: Unix address at which a successor finds the keeper. It names the job and the rank.
        """
        self._address, self._name = address, f"{_PURPOSE} {address[1:]}"
        predecessor = None
        for secret in self._secrets():
            predecessor = predecessor or find_predecessor(self._address, secret)
        if predecessor is not None:
            try:
                self._take_over(predecessor)
            finally:
                predecessor.close()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the kept snapshots, the newest first."""
        return tuple(sorted({kept.about.step for kept in self._kept}, reverse=True))

    @contextlib.contextmanager
    def serving(self, step: int) -> Iterator[None]:
        """Return a context in which the transport serves the kept snapshot of a step.

        Raises:
            ManifestError: The snapshot is damaged, or belongs to a job with another token.
            SnapshotError: There is no kept snapshot of this step, or it cannot be read.
        """
        kept = next((kept for kept in reversed(self._kept) if kept.about.step == step), None)
        if kept is None:
            raise SnapshotError("expected a kept snapshot of the step, got none", step=step)
        keys = self._keys.current() if self._keys is not None else ()
        try:
            snapshot = _open_snapshot(kept.descriptor, kept.about, keys)
        except OSError as error:
            raise SnapshotError(f"expected to read the kept snapshot: {error}", step=step) from error
        with self._server.serving(snapshot):
            yield

    def attend(self) -> None:
        """Start the keeper, so that it runs before the first snapshot. Idempotent."""
        if self._is_attended or self._is_refused:
            return
        self._is_refused = keeper.attends(self._name)  # another manager of this process has the name
        if not self._is_refused:
            self._attend()
            self._is_refused = not keeper.listen(self._name, self._address)
        if self._is_refused:
            logger.warning(
                "another process with the same command, directory, replica_id and rank keeps its state on this host, "
                "or an earlier one had another job token; if this process dies, no restarted process finds its state"
            )

    def begin(self, taking: Taking, *, retained: int | None) -> KeptInProgress:
        """Begin a snapshot to keep, on the thread that owns the state. The caller holds the read lock.

        The snapshots of all other steps than ``retained`` are dropped first, because the new one uses their memory.

        Args:
            taking: The state.
            retained: Step of the snapshot to keep until a later call; ``None`` to keep none.

        Raises:
            SnapshotError: The state cannot be captured, or there is not enough memory.
        """
        self._drop([kept for kept in self._kept if kept.about.step != retained])
        digester = Digester.of(self._keys.current()[0]) if self._keys is not None else PLAIN
        return KeptInProgress(self, self._stager.begin(taking, digester=digester))

    def prefault(self, state: object) -> None:
        """Start to make memory resident for the snapshots of ``state``, in the background.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        self._stager.prefault(state)

    @property
    def is_preparing(self) -> bool:
        """Whether memory is being made resident, so that a snapshot would have to wait."""
        return self._stager.is_preparing

    def add(self, pending: PendingSnapshot) -> None:
        """Complete a snapshot, and let the keeper hold it.

        Raises:
            SnapshotError: The snapshot failed.
        """
        snapshot = pending.finish()
        memory = snapshot.memory
        assert isinstance(memory, MemoryFile), "a kept snapshot shares no tensor with the trainer"
        about = _About(step=snapshot.step, start=memory.start, num_bytes=snapshot.total_bytes)
        self._hold(about, memory.descriptor, snapshot.close)

    def drop_from(self, step: int) -> None:
        """Drop all snapshots of this step and of later steps."""
        self._drop([kept for kept in self._kept if kept.about.step >= step])

    def retain_only(self, step: int) -> None:
        """Drop all snapshots except that of one step."""
        self._drop([kept for kept in self._kept if kept.about.step != step])

    def close(self, *, is_over: bool) -> None:
        """Free the memory of this process.

        Args:
            is_over: Whether the training has ended, so that nobody needs the snapshots. If not, the keeper holds them
                for a successor.
        """
        if self._is_attended:
            if is_over:
                keeper.end(self._name)
                keeper.end_if_idle()
            else:
                keeper.leave(self._name)
        for kept in self._kept:
            kept.close()
        self._kept.clear()
        self._stager.close()

    def _secrets(self) -> Sequence[bytes]:
        keys = self._keys.current() if self._keys is not None else ()
        return [self._secret(key) for key in keys] or [b""]

    def _secret(self, key: Key) -> bytes:
        return key.mac(_PURPOSE, self._address.encode())

    def _take_over(self, predecessor: Predecessor) -> None:
        found: list[tuple[_About, int, Callable[[], None]]] = []
        for held in predecessor.files:
            try:
                about = _decoder.decode(held.about)
            except msgspec.MsgspecError:  # Another version of this package has described it.
                held.file.close()
                continue
            found.append((about, held.file.fileno(), held.file.close))
        self._attend()
        for about, descriptor, close in sorted(found, key=lambda each: each[0].step):
            self._hold(about, descriptor, close)
        # Only now: until then, the predecessor's keeper offers the files.
        keeper.listen(self._name, self._address, predecessor)
        logger.info("the keeper of an earlier process held the state of steps %s", list(self.steps()))

    def _attend(self) -> None:
        keeper.attend(Attend(self._name, HOLDING, str(HELD_S).encode(), self._secrets()[0]))
        self._is_attended = True

    def _hold(self, about: _About, descriptor: int, close: Callable[[], None]) -> None:
        self.attend()
        self._num_kept += 1
        if self._is_attended:
            keeper.hold(self._name, self._num_kept, _encoder.encode(about), descriptor)
        self._kept.append(_Kept(self._num_kept, about, descriptor, close))

    def _drop(self, dropped: Sequence[_Kept]) -> None:
        for kept in dropped:
            # In this order: the keeper must not offer memory that is used again.
            if self._is_attended:
                keeper.drop(self._name, kept.number)
            self._kept.remove(kept)
            kept.close()


class KeptInProgress:
    """A kept snapshot whose large tensors may not be copied yet. The calls are those of a ``SnapshotInProgress``."""

    def __init__(self, snapshots: KeptSnapshots, pending: PendingSnapshot) -> None:
        self._snapshots = snapshots
        self._pending = pending

    def copy_deferred(self) -> None:
        """Copy the deferred tensors. The caller may release the read lock afterwards."""
        self._pending.copy_deferred()

    def publish(self) -> None:
        """Digest the copied state and let the keeper hold it. Needs no lock."""
        self._snapshots.add(self._pending)

    def abandon(self) -> None:
        """Free the memory of the snapshot."""
        self._pending.abandon()


def _open_snapshot(descriptor: int, about: _About, keys: Sequence[Key]) -> Snapshot:
    """Return the snapshot in a memory file.

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
    if (manifest.step, manifest.total_bytes) != (about.step, about.num_bytes):
        raise ManifestError(
            f"expected a snapshot of step {about.step} with {about.num_bytes} bytes, got one of step {manifest.step} "
            f"with {manifest.total_bytes}",
            peer=where,
        )
    mapped = mmap.mmap(descriptor, max(1, manifest.data_bytes), prot=mmap.PROT_READ, offset=data_start)
    return Snapshot(
        step=manifest.step,
        snapshot_id=manifest.snapshot_id,
        header=header,
        memory=MemoryFile(descriptor, about.start, data_start, memoryview(mapped)[: manifest.data_bytes]),
        total_bytes=about.num_bytes,
        close=_nothing,  # The memory is unmapped with the last reference to it.
        digester=manifest.digester,
    )


def _nothing() -> None:
    pass
