"""Taking snapshots: a state at one step is flattened, and what cannot wait is copied at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ft_transport.runtime.garbage_collector import collector_paused
from ft_transport.state.arena import ArenaPool
from ft_transport.state.blocks import FlatState
from ft_transport.state.casting import cast_floating
from ft_transport.state.copy_costs import CopyCosts
from ft_transport.state.copying import HostCopier
from ft_transport.state.device import Accelerator, DeviceCopier, Marks, pinning
from ft_transport.state.flatten import flatten
from ft_transport.state.snapshot import HeldState, PendingSnapshot, Workshop, data_bytes_of, nothing_moved
from ft_transport.wire.digester import PLAIN, Digester


class Stager:
    """Takes snapshots into a pool of reusable arenas.

    Args:
        max_snapshots: How many may be alive at once.
        num_threads: Threads that copy and digest.
        chunk_bytes: The most bytes of a chunk, the unit of digest and fetch; small states have smaller ones.
        is_digested: Whether snapshots have digests; who writes them to disk digests the files.
        digester: Says for each snapshot how its digests are made.
        accelerator: Where streams come from; for tests. ``None`` takes torch's own.
    """

    def __init__(
        self,
        *,
        max_snapshots: int,
        num_threads: int,
        chunk_bytes: int,
        is_digested: bool = True,
        digester: Callable[[], Digester] = lambda: PLAIN,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._pool = ArenaPool(max_snapshots, pin=pinning())
        self._workshop = Workshop(
            pool=self._pool,
            copier=HostCopier(num_threads),
            device_copier=DeviceCopier(accelerator if accelerator is not None else Accelerator()),
            chunk_bytes=chunk_bytes,
            is_digested=is_digested,
            digester=digester,
        )

    @property
    def costs(self) -> CopyCosts:
        """What all its snapshots have cost."""
        return self._workshop.costs

    def prefault(self, state: object) -> None:
        """Makes memory for snapshots of ``state`` ready in the background; returns when its size is known.

        Called on the thread that owns the state.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        with collector_paused():
            flat = flatten(state)
        self._pool.prefault(data_bytes_of(flat))

    def begin(
        self,
        step: int,
        state: object,
        *,
        deferrable: Callable[[torch.Tensor], bool] | None = None,
        shareable: Callable[[torch.Tensor], bool] | None = None,
        check_deferred: Callable[[], None] = nothing_moved,
        check_shared: Callable[[], None] = nothing_moved,
        float_dtype: torch.dtype | None = None,
    ) -> PendingSnapshot:
        """Flattens ``state`` and copies everything that is not ``deferrable``.

        Called under the read lock, on the thread that owns the state.

        Args:
            step: The committed step that the state shows.
            state: Any nesting of supported kinds.
            deferrable: Says of a live tensor that nothing changes it before the read lock is released.
            shareable: Says of a live tensor that it need not be copied at all: its owner calls
                ``CopyOnWriteMemory.materialize`` before changing it. One that does not lie in host memory as the file
                has it is copied nevertheless.
            check_deferred: Raises if what was deferred has changed before it was copied.
            check_shared: Raises if what is shared has changed without being materialized; asked before a receiver may
                rely on it.
            float_dtype: Of all floating-point tensors in the snapshot; ``None`` leaves each as it is.

        Raises:
            SnapshotError: The state cannot be captured; nothing is held.
        """
        with collector_paused():
            flat = flatten(state)
        if float_dtype is not None:
            flat = cast_floating(flat, float_dtype)
        held = HeldState(step=step, flat=flat, marks=self._mark(flat), check=check_deferred)
        pending = self._pending_copy(held, check_shared)
        try:
            pending.copy_now(deferrable, shareable)
            return pending
        except BaseException:
            pending.abandon()
            raise

    def hold(
        self,
        step: int,
        state: object,
        *,
        deferrable: Callable[[torch.Tensor], bool],
        max_bytes: int,
        check: Callable[[], None] = nothing_moved,
        lasts: Callable[[torch.Tensor], bool] | None = None,
    ) -> HeldState | None:
        """Copies what is not ``deferrable``, so that a snapshot of this step can be begun later.

        Called under the read lock, on the thread that owns the state.

        Args:
            step: The committed step that the state shows.
            state: Any nesting of supported kinds.
            deferrable: Says of a live tensor that nothing changes it before the read lock is released.
            max_bytes: Copy no more than this.
            check: Raises if what was not copied here has changed since.
            lasts: Says of a tensor that it stays as it is until `forget_lasting`; its digests are kept until then.

        Returns:
            The held state; ``None`` if more would have to be copied.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        with collector_paused():
            flat = flatten(state)
        blocks = flat.blocks
        own = [index for index, source in enumerate(blocks.sources) if not deferrable(source)]
        if sum(blocks.num_bytes[index] for index in own) > max_bytes:
            return None
        began_s = time.monotonic()
        for index in own:
            copy = blocks.sources[index].detach().clone(memory_format=torch.contiguous_format)
            blocks.sources[index] = copy
            if blocks.addresses[index]:
                blocks.addresses[index] = copy.data_ptr()
        if own:
            num_bytes = sum(blocks.num_bytes[index] for index in own)
            self.costs.add("clone", num_bytes, time.monotonic() - began_s)
        return HeldState(step=step, flat=flat, marks=self._mark(flat), check=check, lasts=lasts)

    def forget_lasting(self) -> None:
        """What lasts may change from here on."""
        self._workshop.lasting.forget()

    def begin_held(self, held: HeldState) -> PendingSnapshot:
        """Begins the snapshot of a held state, once; everything is left to ``copy_deferred``. On any thread.

        Raises:
            SnapshotError: There is no memory for it.
        """
        pending = self._pending_copy(held, held.check)
        pending.defer_all()
        return pending

    def share_held(self, held: HeldState) -> PendingSnapshot:
        """Begins a snapshot that shares the memory of a held state, once; it takes no arena. On any thread.

        The owner calls ``CopyOnWriteMemory.materialize`` before changing anything of it.

        Args:
            held: One that ``is_shareable``.
        """
        pending = PendingSnapshot(held, self._workshop, arena=None, check_shared=held.check)
        pending.share_all()
        return pending

    def _mark(self, flat: FlatState) -> Marks:
        """After what has been queued on the devices by now, the copies may begin."""
        devices = {
            source.device
            for source, address in zip(flat.blocks.sources, flat.blocks.addresses, strict=True)
            if not address and not source.is_cpu
        }
        return self._workshop.device_copier.mark(sorted(devices, key=str)) if devices else {}

    def _pending_copy(self, held: HeldState, check_shared: Callable[[], None]) -> PendingSnapshot:
        arena = self._pool.take(data_bytes_of(held.flat))
        try:
            return PendingSnapshot(held, self._workshop, arena=arena, check_shared=check_shared)
        except BaseException:
            self._pool.give_back(arena)
            raise

    def close(self) -> None:
        """Ends the threads and frees the arenas that nobody reads."""
        self._workshop.copier.close()
        self._pool.close()
