"""Snapshots of this process's state that outlive the process: its keeper holds them for the restarted process.

A kept snapshot is an ordinary snapshot, whose arena is a memory file. The keeper (``ft_transport.keeper``) receives a
descriptor of that file, so keeping copies no bytes. After the death of this process, the restarted process (the
successor) receives the descriptors from the keeper, and its own server serves the snapshots to it. So a kept snapshot
is verified, checked and loaded like that of a peer.

A rank may also hold copies of the kept snapshots of ranks on other hosts (``kept_copies``), with its own.

The trainer writes a new snapshot into the memory of an old one. It tells the keeper first, and the keeper reads that
message even if the trainer dies at once. So the keeper never offers a snapshot that is partly overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ft_transport.credentials import Keys
from ft_transport.errors import SnapshotError, TransportError
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.keeper.messages import Attend
from ft_transport.keeper.predecessor import Predecessor, find_predecessor
from ft_transport.keeper.process import keeper
from ft_transport.keeper.program import HOLDING
from ft_transport.runtime.unix_sockets import listening_addresses
from ft_transport.settings import default_num_threads
from ft_transport.state.copying import CopiesInFlight
from ft_transport.state.snapshot import PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.telemetry.process_state import KeptStatus
from ft_transport.transfer.kept_copies import CopyMemory
from ft_transport.transfer.kept_part import KeptFile, KeptPart, open_part
from ft_transport.transfer.server import StateServer
from ft_transport.wire.chunks import CHUNK_BYTES, PLAIN, Digester
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.snapshot import MemoryFile

logger = logging.getLogger(__name__)

HELD_S: Final = 600.0
"""How long a keeper holds the state of a dead trainer, in seconds. A restart on the same host takes less, as a rule."""
_MAX_KEPT: Final = 2
_PURPOSE: Final = "kept snapshots"


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
    about: KeptFile
    descriptor: int
    close: Callable[[], None]


class KeptSnapshots:
    """The kept snapshots of one process: at most two of its own or of its predecessor, and copies of other ranks'.

    Only one thread at a time may call the methods.

    Attributes:
        history: Name of the present history of steps (`KeptPart`); the owner sets it before `begin`.

    Args:
        server: Serves the snapshots of the predecessor to this process.
        keys: Keys of the job token. A successor must know one of them. ``None`` without a token.
        new_server: Makes servers that serve kept snapshots to other ranks.
    """

    def __init__(self, server: StateServer, keys: Keys | None, new_server: Callable[[], StateServer]) -> None:
        self._address = ""
        self._name = ""
        self._rank, self._num_ranks = 0, 1
        self.history = ""
        self._newest_s = time.monotonic()
        self._server = server
        self._keys = keys
        self._new_server = new_server
        self._sharing_server: StateServer | None = None
        self._sharing = contextlib.ExitStack()
        self._copies = CopyMemory()
        self._stager = Stager(
            max_snapshots=_MAX_KEPT, num_threads=default_num_threads(), chunk_bytes=CHUNK_BYTES, is_patient=True
        )
        self._kept: list[_Kept] = []
        self._num_kept = 0
        self._is_attended = False
        self._is_refused = False

    def open(self, address: str, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Take over the snapshots that the keeper of this process's predecessor holds, if there is one.

        From now on this process's own keeper holds them. Until then the predecessor's keeper does, so that they survive
        the death of this process at any time.

        Args:
            address: Unix address at which a successor finds the keeper. It names the job and the rank.
            rank: Rank of this process within its replica.
            num_ranks: Number of ranks of the replica.
        """
        self._address, self._name = address, f"{_PURPOSE} {address[1:]}"
        self._rank, self._num_ranks = rank, num_ranks
        with self._found(address) as predecessor:
            if predecessor is not None:
                self._attend()
                self._hold_all(predecessor)
                # Only now: until then, the predecessor's keeper offers the files.
                keeper.listen(self._name, self._address, predecessor)

    def adopt(self, prefix: str) -> None:
        """Take over the snapshots of dead processes whose ranks no process of this host has any more.

        Args:
            prefix: Beginning of the addresses that the processes of this job on this host passed to `open`.
        """
        for address in listening_addresses(prefix):
            if address == self._address:
                continue
            with self._found(address) as predecessor:
                if predecessor is not None:
                    self._hold_all(predecessor)
                    predecessor.end()

    def parts(self) -> tuple[KeptPart, ...]:
        """Return the parts of the kept snapshots."""
        return tuple(kept.about.part for kept in self._kept)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest kept snapshot."""
        return max((kept.about.num_bytes for kept in self._kept), default=0)

    def status(self) -> KeptStatus:
        """Return what the keeper holds, for status pages. Any thread may call this."""
        files = [kept.about for kept in tuple(self._kept)]
        own = [file.part.step for file in files if file.part.rank == self._rank]
        copies = [file.part for file in files if file.part.rank != self._rank]
        return KeptStatus(
            step=max(own, default=None),
            age_s=time.monotonic() - self._newest_s,
            num_bytes=sum(file.num_bytes for file in files),
            copied_ranks=tuple(sorted({part.rank for part in copies})),
            copied_step=max((part.step for part in copies), default=None),
        )

    def own_part(self, step: int) -> KeptPart:
        """Return the whole part of this rank at a step of the present history."""
        return KeptPart(step=step, rank=self._rank, num_ranks=self._num_ranks, history=self.history)

    @contextlib.contextmanager
    def serving(self, part: KeptPart) -> Iterator[None]:
        """Return a context in which the transport serves a kept part.

        Raises:
            ManifestError: The snapshot is damaged, or belongs to a job with another token.
            SnapshotError: There is no such kept snapshot, or it cannot be read.
        """
        with self._serving(self._server, part):
            yield

    @contextlib.contextmanager
    def offering(self, step: int) -> Iterator[list[tuple[KeptPart, str]]]:
        """Return a context in which other ranks can fetch all kept parts of a step, each at an address of its own.

        The context leaves out parts that are damaged.
        """
        offered: list[tuple[KeptPart, str]] = []
        with contextlib.ExitStack() as serving:
            for part in {part for part in self.parts() if part.step == step}:
                server = self._new_server()
                serving.callback(server.close, wait=True)
                try:
                    serving.enter_context(self._serving(server, part))
                except TransportError as error:
                    logger.warning("step %d: the kept state of rank %d is not used: %s", step, part.rank, error)
                    continue
                offered.append((part, server.metadata()))
            yield offered

    def share(self, part: KeptPart) -> tuple[str, int]:
        """Serve a kept part to the ranks that copy it, until snapshots are dropped or another part is shared.

        Returns:
            The address, and the digest of the first chunk.

        Raises:
            TransportError: The part is damaged, or no server can be started.
        """
        self._sharing.close()
        if self._sharing_server is None:
            self._sharing_server = self._new_server()
        manifest = self._sharing.enter_context(self._serving(self._sharing_server, part))
        return self._sharing_server.metadata(), manifest.digests[0] if manifest.digests else 0

    def copy(self, part: KeptPart, holder: str, twins: Sequence[str], settings: FetchSettings) -> int:
        """Receive the kept snapshot of another rank, and let the keeper hold it. Return the number of bytes.

        Args:
            part: The part to hold, with the ranks of ``twins``. Without ``part.twins``, the copy will be whole.
            holder: Address at which the snapshot is served, perhaps as a copy with holes.
            twins: Addresses of ranks with the same data, if any.
            settings: Settings of the fetch.

        Raises:
            TransportError: The snapshot could not be received.
        """
        is_filled = not part.twins
        snapshot, is_whole = self._copies.receive(holder, twins, part.step, settings, is_filled=is_filled)
        memory = snapshot.memory
        assert isinstance(memory, MemoryFile), "copies are memory files"
        part = part.whole() if is_whole else part
        about = KeptFile(part=part, start=memory.start, num_bytes=snapshot.total_bytes)
        self._hold(about, memory.descriptor, snapshot.close)
        return snapshot.total_bytes

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

    def begin(self, taking: Taking, *, retained: KeptPart | None) -> KeptInProgress:
        """Begin a snapshot to keep, on the thread that owns the state. The caller holds the read lock.

        All other snapshots than those of the step of ``retained`` are dropped first, because the new one uses their
        memory.

        Args:
            taking: The state.
            retained: A part of the step and history to keep until a later call; ``None`` to keep none.

        Raises:
            SnapshotError: The state cannot be captured, or there is not enough memory.
        """
        self.retain_only(retained)
        digester = Digester.of(self._keys.current()[0]) if self._keys is not None else PLAIN
        return KeptInProgress(self, self._stager.begin(taking, digester=digester))

    def prefault(self, state: object) -> None:
        """Start to make memory resident for the snapshots of ``state``, in the background, without pauses.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        self._stager.prefault(state, is_urgent=True)

    @property
    def must_wait(self) -> bool:
        """Whether a snapshot would wait for memory that is still being made resident."""
        return self._stager.must_wait

    def add(self, pending: PendingSnapshot) -> None:
        """Complete a snapshot, and let the keeper hold it.

        Raises:
            SnapshotError: The snapshot failed.
        """
        snapshot = pending.finish()
        memory = snapshot.memory
        assert isinstance(memory, MemoryFile), "a kept snapshot shares no tensor with the trainer"
        about = KeptFile(part=self.own_part(snapshot.step), start=memory.start, num_bytes=snapshot.total_bytes)
        self._hold(about, memory.descriptor, snapshot.close)
        self._newest_s = time.monotonic()

    def drop_from(self, step: int) -> None:
        """Drop all snapshots of this step and of later steps."""
        self._drop([kept for kept in self._kept if kept.about.part.step >= step])

    def retain_only(self, part: KeptPart | None) -> None:
        """Drop all snapshots of other steps or histories than those of a part; ``None`` for all."""
        self._drop([kept for kept in self._kept if part is None or not kept.about.part.is_of_step(part)])

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
        self._sharing.close()
        if self._sharing_server is not None:
            self._sharing_server.close(wait=False)
        for kept in self._kept:
            kept.close()
        self._kept.clear()
        self._stager.close()
        self._copies.close()

    @contextlib.contextmanager
    def _found(self, address: str) -> Iterator[Predecessor | None]:
        predecessor = None
        for secret in self._secrets(address):
            predecessor = predecessor or find_predecessor(address, secret)
        try:
            yield predecessor
        finally:
            if predecessor is not None:
                predecessor.close()

    def _secrets(self, address: str) -> Sequence[bytes]:
        keys = self._keys.current() if self._keys is not None else ()
        return [key.mac(_PURPOSE, address.encode()) for key in keys] or [b""]

    def _hold_all(self, predecessor: Predecessor) -> None:
        """Let this process's keeper hold what the predecessor's keeper holds."""
        found: list[tuple[KeptFile, int, Callable[[], None]]] = []
        for held in predecessor.files:
            about = KeptFile.decode(held.about)
            if about is None:  # Another version of this package has described it.
                held.file.close()
                continue
            found.append((about, held.file.fileno(), held.file.close))
        for about, descriptor, close in sorted(found, key=lambda each: each[0].part.step):
            self._hold(about, descriptor, close)
        logger.info("the keeper of an earlier process held %s", [about.part for about, _, _ in found])

    @contextlib.contextmanager
    def _serving(self, server: StateServer, part: KeptPart) -> Iterator[Manifest]:
        kept = next((kept for kept in reversed(self._kept) if kept.about.part == part), None)
        if kept is None:
            raise SnapshotError("expected a kept snapshot of the step, got none", step=part.step)
        keys = self._keys.current() if self._keys is not None else ()
        try:
            snapshot, manifest = open_part(kept.descriptor, kept.about, keys)
        except OSError as error:
            raise SnapshotError(f"expected to read the kept snapshot: {error}", step=part.step) from error
        with server.serving(snapshot):
            yield manifest

    def _attend(self) -> None:
        keeper.attend(Attend(self._name, HOLDING, str(HELD_S).encode(), self._secrets(self._address)[0]))
        self._is_attended = True

    def _hold(self, about: KeptFile, descriptor: int, close: Callable[[], None]) -> None:
        self.attend()
        self._num_kept += 1
        if self._is_attended:
            keeper.hold(self._name, self._num_kept, about.encode(), descriptor)
        self._kept.append(_Kept(self._num_kept, about, descriptor, close))

    def _drop(self, dropped: Sequence[_Kept]) -> None:
        if dropped:
            self._sharing.close()
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

    def copy_deferred(self) -> CopiesInFlight | None:
        """Copy the deferred tensors. The caller may release the read lock afterwards."""
        return self._pending.copy_deferred()

    def publish(self) -> None:
        """Digest the copied state and let the keeper hold it. Needs no lock."""
        self._snapshots.add(self._pending)

    def abandon(self) -> None:
        """Free the memory of the snapshot."""
        self._pending.abandon()
