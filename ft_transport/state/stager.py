"""Takes snapshots: flattens a state at one step, and copies at once what cannot wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ft_transport.runtime.decoding import collector_paused
from ft_transport.state.arena import ArenaPool
from ft_transport.state.blocks import cast_floating
from ft_transport.state.copy_on_write import SnapshotResources
from ft_transport.state.copying import HostCopier
from ft_transport.state.device_copies import Accelerator, DeviceCopier, pinning
from ft_transport.state.flatten import flatten
from ft_transport.state.snapshot import HeldState, PendingSnapshot, Taking, data_bytes_of
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.wire.chunks import PLAIN, Digester


class Stager:
    """Takes snapshots into a pool of reusable arenas.

    Args:
        max_snapshots: Maximum number of live snapshots.
        num_threads: Threads that copy and digest.
        chunk_bytes: Maximum bytes of a chunk, the unit of digest and fetch; small states have smaller ones.
        is_digested: Whether snapshots have digests; a store digests its files itself.
        digester: Chooses for each snapshot how its digests are made.
        accelerator: Makes streams; for tests. ``None`` takes torch's own.
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
        self._resources = SnapshotResources(
            pool=self._pool,
            copier=HostCopier(num_threads),
            device_copier=DeviceCopier(accelerator if accelerator is not None else Accelerator()),
            chunk_bytes=chunk_bytes,
            is_digested=is_digested,
            digester=digester,
        )

    @property
    def costs(self) -> MetricValues:
        """Metrics of all its snapshots."""
        return self._resources.costs

    def prefault(self, state: object) -> None:
        """Make memory for snapshots of ``state`` ready in the background; return when its size is known.

        Called on the thread that owns the state.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        with collector_paused():
            flat = flatten(state)
        self._pool.prefault(data_bytes_of(flat))

    def begin(self, wanted: Taking | HeldState, *, share: bool = False) -> PendingSnapshot:
        """Begin a snapshot of a state, under the read lock on the thread that owns it; or, once, of a held state.

        Args:
            wanted: A held state may come from any thread; everything is left to ``copy_deferred`` then.
            share: Copies nothing of a held state that ``is_shareable``, and takes no arena. Its owner calls
                ``CopyOnWriteMemory.materialize`` before changing any of it.

        Raises:
            SnapshotError: The state cannot be captured, or memory for it is missing; no memory is occupied.
        """
        held = wanted if isinstance(wanted, HeldState) else self._flattened(wanted)
        arena = None if share else self._pool.take(data_bytes_of(held.flat))
        try:
            pending = PendingSnapshot(held, self._resources, arena=arena)
            if share:
                pending.share_all()
            elif held is wanted:
                pending.defer_all()
            else:
                pending.copy_now()
            return pending
        except BaseException:
            if arena is not None:
                self._pool.give_back(arena)
            raise

    def hold(self, taking: Taking) -> HeldState | None:
        """Copy everything that is not deferrable, so that a snapshot of this step can be begun later.

        Called under the read lock, on the thread that owns the state.

        Returns:
            The held state; ``None`` if more than ``max_held_bytes`` would have to be copied.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        held = self._flattened(taking)
        blocks, deferrable = held.flat.blocks, taking.deferrable
        own = [index for index, source in enumerate(blocks.sources) if deferrable is None or not deferrable(source)]
        num_bytes = sum(blocks.num_bytes[index] for index in own)
        if num_bytes > taking.max_held_bytes:
            return None
        began_s = time.monotonic()
        for index in own:
            copy = blocks.sources[index].detach().clone(memory_format=torch.contiguous_format)
            blocks.sources[index] = copy
            if blocks.addresses[index]:
                blocks.addresses[index] = copy.data_ptr()
        if own:
            self.costs.add("snapshot_copy_bytes_total", "clone", by=num_bytes)
            self.costs.add("snapshot_copy_seconds_total", "clone", by=time.monotonic() - began_s)
        return held

    def forget_lasting(self) -> None:
        """Discard the digests of lasting tensors, which may change from here on."""
        self._resources.lasting.forget()

    def _flattened(self, taking: Taking) -> HeldState:
        with collector_paused():
            flat = flatten(taking.state)
        if taking.float_dtype is not None:
            flat = cast_floating(flat, taking.float_dtype)
        devices = {
            source.device
            for source, address in zip(flat.blocks.sources, flat.blocks.addresses, strict=True)
            if not address and not source.is_cpu
        }
        # The copies begin after all work that is queued on the devices by now.
        marks = self._resources.device_copier.mark(sorted(devices, key=str)) if devices else {}
        return HeldState(taking=taking, flat=flat, marks=marks)

    def close(self) -> None:
        """End the threads and free the arenas without readers."""
        self._resources.copier.close()
        self._pool.close()
