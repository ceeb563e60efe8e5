"""Takes snapshots: flattens the state of a step, and copies at once the tensors that may change soon."""

from __future__ import annotations

import time
from collections.abc import Set

import torch

from ft_transport.runtime.decoding import collector_paused
from ft_transport.state.arena import ArenaPool
from ft_transport.state.blocks import FlatState, cast_floating
from ft_transport.state.copy_on_write import SnapshotResources
from ft_transport.state.copying import Accelerator, DeviceCopier, Marks, pinning
from ft_transport.state.flatten import flatten
from ft_transport.state.host_copying import HostCopier
from ft_transport.state.snapshot import HeldState, PendingSnapshot, Taking, data_bytes_of
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.wire.chunks import PLAIN, Digester


class Stager:
    """Takes snapshots into a pool of reusable arenas.

    Args:
        max_snapshots: Maximum number of snapshots that exist at the same time.
        num_threads: Number of threads that copy and digest.
        chunk_bytes: Maximum number of bytes in a chunk, the unit of digest and fetch. Small states have smaller chunks.
        is_digested: Whether snapshots have digests. A checkpoint store needs none, because it digests its files.
        is_patient: Whether nobody waits for the snapshots, so that digests may yield to training (`HostCopier`).
        accelerator: Makes streams and events; torch's own by default. Tests pass a fake.
    """

    def __init__(
        self,
        *,
        max_snapshots: int,
        num_threads: int,
        chunk_bytes: int,
        is_digested: bool = True,
        is_patient: bool = False,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._pool = ArenaPool(max_snapshots, pin=pinning())
        self._resources = SnapshotResources(
            pool=self._pool,
            copier=HostCopier(num_threads, is_patient=is_patient),
            device_copier=DeviceCopier(accelerator if accelerator is not None else Accelerator()),
            chunk_bytes=chunk_bytes,
            is_digested=is_digested,
        )

    @property
    def costs(self) -> MetricValues:
        """The bytes and seconds of all copies, as metrics."""
        return self._resources.costs

    def prefault(self, state: object, *, is_urgent: bool = False) -> None:
        """Start to make memory for snapshots of ``state`` resident, in the background. Copies nothing.

        Called on the thread that owns the state.

        Args:
            state: The state.
            is_urgent: See `ArenaPool.prefault`.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        with collector_paused():
            flat = flatten(state)
        self._pool.prefault(data_bytes_of(flat), is_urgent=is_urgent)

    @property
    def must_wait(self) -> bool:
        """Whether `begin` would wait for memory that `prefault` is making resident."""
        return self._pool.must_wait

    def begin(self, wanted: Taking | HeldState, *, share: bool = False, digester: Digester = PLAIN) -> PendingSnapshot:
        """Begin a snapshot.

        Args:
            wanted: The state to capture. Pass a `Taking` on the thread that owns the state, under the read lock. Pass a
                `HeldState` on any thread, once; ``copy_deferred`` then copies everything.
            share: Whether to serve a held state that ``is_shareable`` from live memory, without a copy or an arena. The
                owner must call ``CopyOnWriteMemory.materialize`` before it changes the state.
            digester: Computes the digests of the snapshot.

        Raises:
            SnapshotError: The state cannot be captured, or not enough memory is free. No arena stays in use.
        """
        held = wanted
        if isinstance(held, Taking):
            flat = self._flattened(held)
            held = HeldState(taking=held, flat=flat, marks=self._marks(flat))
        arena = None if share else self._pool.take(data_bytes_of(held.flat))
        try:
            pending = PendingSnapshot(held, self._resources, digester=digester, arena=arena)
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

    def mark(self, devices: Set[torch.device]) -> Marks:
        """Record an event on the calling thread's stream of each device, except the host.

        The training thread calls this at the step boundary, for a `hold` on another thread.
        """
        on_streams = [device for device in devices if device.type not in ("cpu", "meta")]
        return self._resources.device_copier.mark(sorted(on_streams, key=str))

    def hold(self, taking: Taking, marks: Marks | None = None) -> HeldState | None:
        """Copy the tensors that are not deferrable, so that a snapshot of this step can begin later.

        Called under the read lock.

        Args:
            taking: The state to capture.
            marks: The result of `mark`, if this is not the thread that owns the state.

        Returns:
            The held state; ``None`` if these tensors have more than ``max_held_bytes`` bytes.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        flat = self._flattened(taking)
        blocks, deferrable = flat.blocks, taking.deferrable
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
        # After the clones, which are queued on this thread's streams as well.
        return HeldState(taking=taking, flat=flat, marks=self._marks(flat) | (marks or {}))

    def forget_lasting(self) -> None:
        """Discard the cached digests of lasting tensors. Called before one of these tensors may change."""
        self._resources.lasting.forget()

    @staticmethod
    def _flattened(taking: Taking) -> FlatState:
        with collector_paused():
            flat = flatten(taking.state)
        return flat if taking.float_dtype is None else cast_floating(flat, taking.float_dtype)

    def _marks(self, flat: FlatState) -> Marks:
        """Record an event, after all work that is queued now, on each device with a tensor of the state."""
        devices = {
            source.device
            for source, address in zip(flat.blocks.sources, flat.blocks.addresses, strict=True)
            if not address and not source.is_cpu
        }
        return self._resources.device_copier.mark(sorted(devices, key=str))

    def close(self) -> None:
        """End the threads, and free each arena as soon as nobody reads it."""
        self._resources.copier.close()
        self._pool.close()
