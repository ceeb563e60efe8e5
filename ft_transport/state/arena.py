"""Arenas: reusable host buffers for snapshots. Each is an anonymous memory file, from which the kernel can send.

Filling a fresh mapping takes ten times as long as filling resident memory, because the kernel must find and clear
every page. So an arena is made resident once, and is reused for many snapshots. ``ArenaPool.prefault`` prepares arenas
on a separate thread, before the first snapshot needs one.
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

The header is encoded after the copy, when the digests are known, and is written directly before the data. The unused
bytes before the header are a hole in the file, and use no memory.
"""
_NAME: Final = "ft-transport-snapshot"
_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1, include/uapi/linux/fcntl.h
_REST_SHARE: Final = 4.0
"""Seconds of pause for each CPU second of prefaulting that is not urgent, so that training is not slowed down."""

logger = logging.getLogger(__name__)


class Arena:
    """One memory file for the header and ``capacity_bytes`` of tensor data, mapped and resident.

    Not thread-safe. The code that takes an arena writes it once; then the content stays unchanged until the arena is
    given back.

    Args:
        capacity_bytes: Largest number of data bytes.
        pin: Page-locks the memory for device copies, and returns a function that unlocks it; ``None`` for no pinning.
        is_wanted: Called repeatedly while the memory becomes resident (about a second for one or two gigabytes). If it
            returns ``False``, the construction fails.
        rest: Called repeatedly meanwhile, with the CPU seconds of work since its previous call. It may sleep.
        is_resident: Whether all memory is made resident; otherwise only what is written uses memory.

    Attributes:
        capacity_bytes: Largest number of data bytes.
        data: The mapped data as a CPU tensor, ``uint8 [capacity_bytes]``.
        view: The same memory as a memoryview.
        descriptor: Descriptor of the memory file, whose data begins at ``HEADER_ROOM_BYTES``. On Linux the file is
            sealed: other processes with the descriptor cannot change its content or length.
        place: The slot of the pool that this arena occupies; ``None`` while the arena is free.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        pin: Callable[[torch.Tensor], Callable[[], None]] | None,
        is_wanted: Callable[[], bool],
        rest: Callable[[float], None] | None = None,
        is_resident: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.place: Place | None = None
        descriptors: list[int] = []
        self._unpin: list[Callable[[], None]] = []
        # A finalizer, because a signal handler may raise before the caller gets this object.
        self._end = weakref.finalize(self, _release, self._unpin, descriptors)
        if sys.platform == "linux":
            # In C, so that no signal handler can raise between the creation and the store of the descriptor.
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
            if is_resident:
                make_resident(self.data.data_ptr(), capacity_bytes, is_wanted=is_wanted, rest=rest)
            self.view = memoryview(self._mapping).cast("B")
            if pin is not None:
                self._unpin.append(pin(self.data))
        except BaseException:
            self._end()
            # The traceback of the error refers to this object, which would keep the memory alive.
            vars(self).clear()
            raise

    def write_header(self, header: bytes) -> int:
        """Write ``header`` directly before the data. Return the position of the header in the file."""
        start = HEADER_ROOM_BYTES - len(header)
        self._header_room[start:] = header
        return start

    def close(self) -> None:
        """Close the file. The memory is freed when the last tensor that shares it is deleted."""
        self._end()
        self._header_room.close()
        # Tensors that share the mapping keep it alive.
        del self.data, self.view, self._mapping


class ArenaPool:
    """Lends at most ``max_arenas`` reusable arenas, each to one snapshot at a time. Thread-safe.

    Args:
        max_arenas: Maximum number of arenas.
        pin: Page-locks an arena for device copies and returns a function that unlocks it; ``None`` without a device.
        are_resident: As for `Arena`. If not, `take` does not check how much memory is free.
    """

    def __init__(
        self,
        max_arenas: int,
        *,
        pin: Callable[[torch.Tensor], Callable[[], None]] | None = None,
        are_resident: bool = True,
    ) -> None:
        self._max_arenas = max_arenas
        self._pin = pin
        self._are_resident = are_resident
        self._changed = SafeCondition()
        self._free: list[Arena] = []
        self._places = Places()
        self._num_waiting = 0
        self._is_urgent = False
        self._preparing: SafeThread | None = None
        self._prepared_bytes = 0
        self._closed = False

    def prefault(self, data_bytes: int, *, is_urgent: bool = False) -> None:
        """Start to make ``max_arenas`` arenas for ``data_bytes`` each, on a background thread. Returns at once.

        Does nothing while the thread of an earlier call is running. Makes an arena only if at least twice
        ``data_bytes`` of memory is free. A failure is logged, and `take` tries again.

        Args:
            data_bytes: Size of each arena.
            is_urgent: Whether the thread makes no pauses, although that slows training down.

        Raises:
            SnapshotError: The system refuses another thread.
        """
        with self._changed:
            if self._closed or self._preparing is not None or not self._is_one_missing(data_bytes):
                return
            preparing = SafeThread(target=self._prepare, args=(data_bytes,), name="ft-transport-arena", daemon=True)
            self._preparing, self._prepared_bytes, self._is_urgent = preparing, data_bytes, is_urgent
            try:
                preparing.start()
            except BaseException as error:
                # If a signal handler raised during `start`, the thread may never run, and nobody must wait for it.
                self._preparing = None
                if isinstance(error, ThreadRefusedError):
                    raise SnapshotError(
                        f"expected to start a thread that prepares memory for snapshots: {error}"
                    ) from error
                raise

    @property
    def must_wait(self) -> bool:
        """Whether `take` would wait for the background thread, because no prepared arena is free yet."""
        with self._changed:
            is_one_free = any(arena.capacity_bytes >= self._prepared_bytes for arena in self._free)
            return self._preparing is not None and not is_one_free

    def num_taken(self) -> int:
        """Return the number of arenas in use, including those that `take` is making."""
        return self._places.num_taken()

    def take(self, data_bytes: int) -> Arena:
        """Return a free arena for ``data_bytes`` of data, or make a new one.

        Raises:
            SnapshotLimitError: All arenas are in use.
            SnapshotError: Not enough memory is free, or the pool is closed.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise SnapshotError("expected an open transport, got one that was shut down")
                fitting = [arena for arena in self._free if arena.capacity_bytes >= data_bytes]
                if fitting:
                    arena = min(fitting, key=lambda candidate: candidate.capacity_bytes)
                    # In this order: if a signal handler raises in between, the arena must not be both free and in use.
                    self._free.remove(arena)
                    arena.place = self._places.take()
                    return arena
                is_coming = self._preparing is not None and self._prepared_bytes >= data_bytes
                if not is_coming or self.num_taken() >= self._max_arenas:
                    break
                # Wait for the arena that the background thread is making: a new one would take longer.
                self._num_waiting += 1
                self._changed.notify_all()
                try:
                    self._changed.wait()
                finally:
                    self._num_waiting -= 1
            # Tell the background thread that arenas for a smaller state are useless now.
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
            # Fail rather than risk an out-of-memory kill: a receiver can wait, a killed replica is lost.
            if self._are_resident:
                refuse_beyond_available(data_bytes)
            arena = self._make(data_bytes, is_wanted=lambda: not self._closed)
            arena.place = place
            return arena
        except BaseException as error:
            place.give_back()
            if isinstance(error, (OSError, OverflowError)):
                raise SnapshotError(f"expected {data_bytes} bytes of host memory for a snapshot: {error}") from error
            raise

    def give_back(self, arena: Arena, *, is_reused: bool = True) -> None:
        """Return an arena to the pool when nobody reads it any more. A second call does nothing.

        Args:
            arena: The arena.
            is_reused: Whether the pool may keep its memory for another snapshot.
        """
        with self._changed:
            if arena.place is None:
                return
            arena.place.give_back()
            arena.place = None
            keep = is_reused and not self._closed
            if keep:
                self._free.append(arena)
                self._changed.notify_all()
        if not keep:
            arena.close()

    def close(self) -> None:
        """Close all free arenas now, and each arena in use when it is given back."""
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
                refuse_beyond_available(2 * data_bytes)
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
        capacity_bytes = max(-(-data_bytes // page) * page, page)
        return Arena(capacity_bytes, pin=self._pin, is_wanted=is_wanted, rest=rest, is_resident=self._are_resident)

    def _rest(self, worked_s: float) -> None:
        """Pause so that training is not slowed down, unless the memory is needed now."""
        with self._changed:
            if not (self._num_waiting or self._is_urgent or self._closed):
                self._changed.wait(_REST_SHARE * worked_s)

    def _is_prepared_for(self, data_bytes: int) -> bool:
        return not self._closed and self._prepared_bytes <= data_bytes

    def _is_one_missing(self, data_bytes: int) -> bool:
        num_fitting = sum(arena.capacity_bytes >= data_bytes for arena in self._free)
        return self.num_taken() + num_fitting < self._max_arenas

    def _drop_outgrown(self, data_bytes: int) -> list[Arena]:
        """Remove and return the free arenas that have room for less than ``data_bytes``."""
        outgrown = [arena for arena in self._free if arena.capacity_bytes < data_bytes]
        self._free = [arena for arena in self._free if arena.capacity_bytes >= data_bytes]
        return outgrown


def refuse_beyond_available(num_bytes: int) -> None:
    """Raise a `SnapshotError` if less than ``num_bytes`` of host memory is free: a killed process would be worse."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise SnapshotError(f"expected {num_bytes} bytes of free host memory for a snapshot, but {available} are left")


def _release(unpin: list[Callable[[], None]], descriptors: list[int]) -> None:
    for each in unpin:
        each()
    for descriptor in descriptors:
        os.close(descriptor)


def _temporary_file() -> int:
    with tempfile.NamedTemporaryFile(prefix=_NAME) as file:
        return os.dup(file.fileno())


def _seal(descriptor: int) -> None:
    """Forbid all writes to the file except through its existing mappings (``man 2 fcntl``, file sealing)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # Linux before 5.1: such a descriptor is never passed to other processes.
            fcntl.fcntl(
                descriptor,
                fcntl.F_ADD_SEALS,
                _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
