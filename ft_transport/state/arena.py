"""Arenas: reusable host buffers. Each is an anonymous memory file, from which the kernel can send.

Filling a fresh mapping takes ten times as long as filling resident memory, because the kernel has to find and clear
every page. So an arena becomes resident once and then serves many snapshots. ``ArenaPool.prefault`` prepares arenas on
a thread of its own, before the first request.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Final

import torch

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.runtime.signal_safe import Place, Places, SafeCondition, SafeThread, ThreadRefusedError
from ft_transport.state.prefaulted import available_bytes, make_resident, map_file
from ft_transport.wire.manifest import MAX_HEADER_BYTES

HEADER_ROOM_BYTES: Final = -(-(MAX_HEADER_BYTES + 8) // (2 << 20)) * (2 << 20)
"""Position of the tensor data in an arena's file.

The header is encoded after the copy, when the digests are known, and is written right before the data. The rest of the
room before the data is a hole in the file and takes no memory.
"""
_NAME: Final = "ft-transport-snapshot"
_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1, include/uapi/linux/fcntl.h
_REST_SHARE: Final = 4.0
"""Pause for each second of work on memory without a waiting caller: training needs the core and the page tables."""

logger = logging.getLogger(__name__)


class Arena:
    """One memory file with room for ``capacity_bytes`` of tensor data, mapped and resident.

    Not thread-safe: its holder writes it once; then it stays unchanged until it returns to its pool.

    Args:
        capacity_bytes: Room for data.
        pin: See ``ArenaPool``.
        is_wanted: Called repeatedly while the memory becomes resident (about a second for one or two gigabytes).
        rest: Called repeatedly meanwhile, with the seconds of work since the last call.

    Attributes:
        capacity_bytes: Room for data.
        data: ``uint8 [capacity_bytes]``, the mapping as a CPU tensor.
        view: The same memory as a memoryview.
        descriptor: The memory file; data begins at ``HEADER_ROOM_BYTES``. On Linux it is sealed: other holders of the
            descriptor cannot change its content or length, only this object can through its mappings.
        place: Its place in a pool; ``None`` without a holder.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        pin: Callable[[torch.Tensor], Callable[[], None]] | None,
        is_wanted: Callable[[], bool],
        rest: Callable[[float], None] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.place: Place | None = None
        descriptors: list[int] = []
        self._unpin: list[Callable[[], None]] = []
        # Also frees the memory of an arena that a handler's exception drops.
        self._end = weakref.finalize(self, _release, self._unpin, descriptors)
        if sys.platform == "linux":
            # One call, in which no handler can raise before the number is stored.
            descriptors.extend(map(os.memfd_create, (_NAME,), (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,)))
        else:
            descriptors.append(_temporary_file())
        self.descriptor = descriptors[0]
        try:
            os.ftruncate(self.descriptor, HEADER_ROOM_BYTES + capacity_bytes)
            self._mapping = map_file(self.descriptor, capacity_bytes, offset=HEADER_ROOM_BYTES)
            self._header_room = mmap.mmap(self.descriptor, HEADER_ROOM_BYTES)
            _seal(self.descriptor)
            self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)
            make_resident(self.data.data_ptr(), capacity_bytes, is_wanted=is_wanted, rest=rest)
            self.view = memoryview(self._mapping).cast("B")
            if pin is not None:
                self._unpin.append(pin(self.data))
        except BaseException:
            self._end()
            # The error's traceback refers to this object.
            vars(self).clear()
            raise

    def write_header(self, header: bytes) -> int:
        """Write ``header`` right before the data; return its position in the file."""
        start = HEADER_ROOM_BYTES - len(header)
        self._header_room[start:] = header
        return start

    def close(self) -> None:
        """Free the memory when the last tensor that shares it is deleted."""
        self._end()
        self._header_room.close()
        # Tensors that share the mapping keep it alive.
        del self.data, self.view, self._mapping


class ArenaPool:
    """At most ``max_arenas`` reusable arenas, each with one holder at a time. Thread-safe.

    Args:
        max_arenas: Maximum number of arenas.
        pin: Page-locks an arena for device copies and returns a function that unlocks it; ``None`` without a device.
    """

    def __init__(self, max_arenas: int, *, pin: Callable[[torch.Tensor], Callable[[], None]] | None = None) -> None:
        self._max_arenas = max_arenas
        self._pin = pin
        self._changed = SafeCondition()
        self._free: list[Arena] = []
        self._places = Places()
        self._num_waiting = 0
        self._preparing: SafeThread | None = None
        self._prepared_bytes = 0
        self._closed = False

    def prefault(self, data_bytes: int) -> None:
        """Make, in the background, the maximum number of arenas with room for ``data_bytes``. Returns at once.

        Does nothing during an earlier call's work. A failure is logged; ``take`` tries again. Allocates in advance only
        if the same amount of memory stays free.

        Raises:
            SnapshotError: The system has no further thread.
        """
        with self._changed:
            if self._closed or self._preparing is not None or not self._is_one_missing(data_bytes):
                return
            preparing = SafeThread(target=self._prepare, args=(data_bytes,), name="ft-transport-arena", daemon=True)
            self._preparing, self._prepared_bytes = preparing, data_bytes
            try:
                preparing.start()
            except BaseException as error:
                # A thread that a handler interrupted at its start may never run; no caller must wait for it.
                self._preparing = None
                if isinstance(error, ThreadRefusedError):
                    raise SnapshotError(f"expected a thread that prepares memory for snapshots: {error}") from error
                raise

    def num_taken(self) -> int:
        """Return the number of arenas with a holder, including those in construction for one."""
        return self._places.num_taken()

    def take(self, data_bytes: int) -> Arena:
        """Return a free arena with room for ``data_bytes``, or a new one.

        Raises:
            SnapshotLimitError: Every arena is taken.
            SnapshotError: Not enough memory, or the pool is closed.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise SnapshotError("expected an open transport, got one that was shut down")
                fitting = [arena for arena in self._free if arena.capacity_bytes >= data_bytes]
                if fitting:
                    arena = min(fitting, key=lambda candidate: candidate.capacity_bytes)
                    # In this order: after an interruption the arena must not be both free and taken.
                    self._free.remove(arena)
                    arena.place = self._places.take()
                    return arena
                is_coming = self._preparing is not None and self._prepared_bytes >= data_bytes
                if not is_coming or self.num_taken() >= self._max_arenas:
                    break
                # An arena in preparation is ready sooner than a new one, and its thread always ends.
                self._num_waiting += 1
                self._changed.notify_all()
                try:
                    self._changed.wait()
                finally:
                    self._num_waiting -= 1
            # Arenas in preparation for a smaller state are useless now.
            self._prepared_bytes = max(self._prepared_bytes, data_bytes)
            if self.num_taken() >= self._max_arenas:
                raise SnapshotLimitError(
                    f"expected at most {self._max_arenas} snapshots alive at once (max_snapshots), and all of them are "
                    "still being written or read"
                )
            outgrown = self._drop_outgrown(data_bytes)
            place = self._places.take()
        for arena in outgrown:
            arena.close()
        try:
            # A missing snapshot costs a receiver time; an out-of-memory kill costs a replica.
            _refuse_beyond_available(data_bytes)
            arena = self._make(data_bytes, is_wanted=lambda: not self._closed)
            arena.place = place
            return arena
        except BaseException as error:
            place.give_back()
            if isinstance(error, (OSError, OverflowError)):
                raise SnapshotError(f"expected {data_bytes} bytes of host memory for a snapshot: {error}") from error
            raise

    def give_back(self, arena: Arena) -> None:
        """Return an arena without readers to the pool; a second call does nothing."""
        with self._changed:
            if arena.place is None:
                return
            arena.place.give_back()
            arena.place = None
            keep = not self._closed
            if keep:
                self._free.append(arena)
                self._changed.notify_all()
        if not keep:
            arena.close()

    def close(self) -> None:
        """Close free arenas now, and the others when they return."""
        with self._changed:
            self._closed = True
            preparing = self._preparing
            free, self._free = self._free, []
            self._changed.notify_all()
        for arena in free:
            arena.close()
        if preparing is not None:
            preparing.join()

    def _prepare(self, data_bytes: int) -> None:
        try:
            while True:
                with self._changed:
                    if not self._is_prepared_for(data_bytes) or not self._is_one_missing(data_bytes):
                        return
                    outgrown = self._drop_outgrown(data_bytes)
                for arena in outgrown:
                    arena.close()
                _refuse_beyond_available(2 * data_bytes)
                arena = self._make(data_bytes, is_wanted=lambda: self._is_prepared_for(data_bytes), rest=self._rest)
                with self._changed:
                    keep = self._is_prepared_for(data_bytes) and self._is_one_missing(data_bytes)
                    if keep:
                        self._free.append(arena)
                        self._changed.notify_all()
                if not keep:
                    arena.close()
        except Exception as error:
            if self._is_prepared_for(data_bytes):
                logger.warning("no memory could be prefaulted for snapshots of %d bytes: %s", data_bytes, error)
        finally:
            with self._changed:
                self._preparing = None
                self._changed.notify_all()

    def _make(
        self, data_bytes: int, *, is_wanted: Callable[[], bool], rest: Callable[[float], None] | None = None
    ) -> Arena:
        page = mmap.PAGESIZE
        return Arena(max(-(-data_bytes // page) * page, page), pin=self._pin, is_wanted=is_wanted, rest=rest)

    def _rest(self, worked_s: float) -> None:
        """Pause in favour of training, unless a caller waits for the memory."""
        with self._changed:
            if not (self._num_waiting or self._closed):
                self._changed.wait(_REST_SHARE * worked_s)

    def _is_prepared_for(self, data_bytes: int) -> bool:
        return not self._closed and self._prepared_bytes <= data_bytes

    def _is_one_missing(self, data_bytes: int) -> bool:
        num_fitting = sum(arena.capacity_bytes >= data_bytes for arena in self._free)
        return self.num_taken() + num_fitting < self._max_arenas

    def _drop_outgrown(self, data_bytes: int) -> list[Arena]:
        """Remove and return free arenas that are too small for the present state."""
        outgrown = [arena for arena in self._free if arena.capacity_bytes < data_bytes]
        self._free = [arena for arena in self._free if arena.capacity_bytes >= data_bytes]
        return outgrown


def _refuse_beyond_available(num_bytes: int) -> None:
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise SnapshotError(f"expected {num_bytes} bytes of free host memory for a snapshot, {available} are left")


def _release(unpin: list[Callable[[], None]], descriptors: list[int]) -> None:
    for each in unpin:
        each()
    for descriptor in descriptors:
        os.close(descriptor)


def _temporary_file() -> int:
    with tempfile.NamedTemporaryFile(prefix=_NAME) as file:
        return os.dup(file.fileno())


def _seal(descriptor: int) -> None:
    """Make the present mappings the only way to write the file (``man 2 fcntl``, file sealing)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # A kernel before 5.1; then the descriptor is not shared.
            fcntl.fcntl(
                descriptor,
                fcntl.F_ADD_SEALS,
                _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
