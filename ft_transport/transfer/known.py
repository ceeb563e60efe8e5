"""The data that a receiver already has from earlier fetches, and the plan of a fetch of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import torch

from ft_transport.errors import ConfigurationError, RestoreError
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import find_damaged
from ft_transport.settings import default_num_threads
from ft_transport.state.comparison import find_differences
from ft_transport.state.restore import Range, Restore
from ft_transport.transfer.sources import AgreedSources
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import Manifest

T = TypeVar("T")

_MOST_CHANGING: Final = 0.5
"""If more than this fraction of the data may have changed, a fetch requests everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[T]):
    """A completely received and verified state, and its committed step.

    Attributes:
        step: Committed step of the state.
        state: The state.
        num_bytes_fetched: Bytes of data that were received over the network or copied from the memory of a source on
            this host; ``None`` if they were not counted.
    """

    step: int
    state: T
    _manifest: Manifest
    num_bytes_fetched: int | None = None
    _is_changing: Callable[[torch.Tensor], bool] = lambda _own: False

    def differences(self, state: object) -> tuple[str, ...]:
        """Compare a loaded state, bit for bit, with the state that the source sent.

        Reads every byte of ``state`` once, and sends nothing.

        Args:
            state: The receiver's state after its load functions have run. No thread may change it meanwhile.

        Returns:
            A description of each difference, which begins with the path; empty if nothing differs.

        Raises:
            UnsupportedLeafError: A leaf of ``state`` has no safe encoding.
            ConfigurationError: The state was fetched without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise ConfigurationError("expected a state that was fetched with is_comparable=True, got one without")
        return find_differences(self._manifest, state, num_threads=default_num_threads())

    def but_for(self, is_changing: Callable[[torch.Tensor], bool]) -> Received[T]:
        """Return a copy for ``known=`` of a later fetch. ``is_changing`` selects the tensors that may have changed.

        The later fetch requests these tensors at once. Of the other tensors, it requests only the chunks whose digests
        differ.

        Args:
            is_changing: Function that returns whether one of the receiver's tensors may have changed since this fetch,
                at the receiver or at the source.
        """
        return dataclasses.replace(self, _is_changing=is_changing)

    def changed_ranges(self, manifest: Manifest, restore: Restore) -> list[Range] | None:
        """Return the byte ranges of a later state that may have changed; ``None`` to fetch everything.

        Args:
            manifest: Manifest of the later state.
            restore: The receiver's memory for the later state.
        """
        base = self._manifest
        is_same = (
            base.digests is not None
            and base.tensors == manifest.tensors
            and base.chunks == manifest.chunks
            and base.digester == manifest.digester
        )
        if not is_same:
            return None
        ranges = _merged(
            (entry.start, entry.end)
            for index, entry in enumerate(manifest.tensors)
            if entry.end > entry.start and (not (own := restore.tensors_for(index)) or any(map(self._is_changing, own)))
        )
        num_bytes = sum(end - start for start, end in ranges)
        return ranges if num_bytes <= _MOST_CHANGING * manifest.data_bytes else None

    def differing_chunks(self, manifest: Manifest, ranges: Sequence[Range]) -> list[int]:
        """Return the chunks outside of ``ranges`` whose digests in a later state differ from those in this state.

        Args:
            manifest: Manifest of the later state, with digests.
            ranges: The byte ranges that were fetched already.
        """
        before, now = self._manifest.digests, manifest.digests
        assert before is not None, "changed_ranges returns no ranges without digests"
        assert now is not None, "the caller passes a manifest with digests"
        chunk_bytes = manifest.chunks.chunk_bytes
        fetched = {chunk for start, end in ranges for chunk in range(start // chunk_bytes, -(-end // chunk_bytes))}
        return [
            chunk
            for chunk, (old, new) in enumerate(zip(before, now, strict=True))
            if old != new and chunk not in fetched
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBut:
    """Makes a fetch leave out some tensors, which the receiver gets in another way: they stay as they are.

    A left out tensor that the receiver lacks has any values in the fetched state. The fetched data is verified, but
    `Received.differences` cannot be called.

    Attributes:
        is_left_out: Function that returns whether to leave out a tensor. Its arguments are the tensor's name in the
            snapshot, which is its path joined by dots, and the receiver's tensors that would receive it.
        max_bytes: Largest number of bytes to fetch.
    """

    is_left_out: Callable[[str, Sequence[torch.Tensor]], bool]
    max_bytes: int

    def ranges(self, manifest: Manifest, restore: Restore) -> list[Range]:
        """Return the byte ranges of the tensors that are not left out.

        Raises:
            RestoreError: These tensors have more than ``max_bytes``.
        """
        ranges = _merged(
            (entry.start, entry.end)
            for index, entry in enumerate(manifest.tensors)
            if entry.end > entry.start and not self.is_left_out(entry.name, restore.tensors_for(index))
        )
        num_bytes = sum(end - start for start, end in ranges)
        if num_bytes > self.max_bytes:
            raise RestoreError(
                f"expected at most {self.max_bytes} bytes besides the tensors that are left out, got {num_bytes}",
                step=manifest.step,
            )
        return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a fetch: the data to request, from which sources, into which memory.

    Attributes:
        agreed: The sources.
        restore: Memory of the receiver for the state.
        manifest: Manifest of the state, with digests if the plan needed them.
        chunks: The missing chunks, ascending.
        ranges: Byte ranges to fetch before the chunks; ``None`` if no earlier fetch determines such ranges.
        is_whole: Whether the receiver has the whole state after the fetch.
    """

    agreed: AgreedSources
    restore: Restore
    manifest: Manifest
    chunks: Sequence[int]
    ranges: Sequence[Range] | None = None
    is_whole: bool = True

    @property
    def num_bytes(self) -> int:
        """Number of bytes of data that the plan requests."""
        num_bytes = sum(end - start for start, end in self.ranges or ())
        return num_bytes + sum(map(self.manifest.chunks.length_of, self.chunks))


class PartialState:
    """The received chunks of fetches that failed, so that the next fetch requests only the rest.

    Pass this object as ``known=`` of ``HTTPTransport.fetch`` to each of these fetches. A fetch that fails stores its
    received chunks here. The next fetch, from any source, verifies these chunks and requests the others. A fetch that
    succeeds empties the object. One thread at a time may use the object.

    After a failed fetch, the receiver's tensors contain a mixture of two states. Do not use the tensors before a fetch
    has succeeded or `discard` has overwritten them.

    Args:
        known: Data that the receiver has before the first of these fetches; see ``HTTPTransport.fetch``.

    Raises:
        ConfigurationError: ``known`` has another type or value.
    """

    def __init__(self, known: Received[Any] | AllBut | Literal["into"] | None = None) -> None:
        if not (known is None or known == "into" or isinstance(known, (Received, AllBut))):
            raise ConfigurationError(
                'expected a Received, an AllBut, a PartialState, "into" or None as known, got '
                f"{type(known).__name__} {known!r}"
            )
        self._known = known
        self._chunks = ChunkTable(data_bytes=0, chunk_bytes=1)
        self._has_landed = bytearray()
        self._restore: Restore | None = None
        self._was_touched = False

    @property
    def num_bytes(self) -> int:
        """Number of received bytes."""
        return sum(map(self._chunks.length_of, self.landed()))

    def landed(self) -> list[int]:
        """Return the received chunks, ascending."""
        return [chunk for chunk, has_landed in enumerate(self._has_landed) if has_landed]

    def discard(self) -> None:
        """Drop the received chunks. Overwrite the receiver's tensors with NaN patterns if they contain such data."""
        restore = self._restore
        self.complete()
        if restore is not None and restore.destination_touched:
            restore.poison()

    def plan(self, agreed: AgreedSources, restore: Restore, settings: FetchSettings) -> Plan:
        """Compare what the receiver already has with the sources' manifest, and plan the fetch of the rest.

        Args:
            agreed: The sources.
            restore: Memory of the receiver for the state; this object references it until the fetch succeeds.
            settings: Settings of the fetch.

        Raises:
            TransportError: The sources did not send the digests.
        """
        manifest, known = agreed.manifest, self._known
        every = range(manifest.chunks.num_chunks)
        present: Sequence[int] = self._move_to(manifest, restore)
        if isinstance(known, AllBut):
            ranges = known.ranges(manifest, restore)
            return Plan(agreed=agreed, restore=restore, manifest=manifest, chunks=(), ranges=ranges, is_whole=False)
        # If a failed attempt has overwritten a part of ``known``, the digests show which chunks are still right.
        if known == "into" or (known is not None and self._was_touched and not present):
            present = every
        elif isinstance(known, Received) and not present:
            changed = known.changed_ranges(manifest, restore)
            if changed is not None:
                return Plan(agreed=agreed, restore=restore, manifest=manifest, chunks=(), ranges=changed)
        missing: Sequence[int] = every
        if present:
            manifest = agreed.manifest_with_digests(settings)
            restore.read_own(manifest.chunks.range_of(chunk, chunk + 1) for chunk in present)
            damaged = find_damaged(manifest, restore.present, chunks=list(present))
            intact = set(present).difference(damaged)
            missing = [chunk for chunk in every if chunk not in intact]
        self._note_all_but(missing)
        settings.timeouts.note_progress()
        return Plan(agreed=agreed, restore=restore, manifest=manifest, chunks=missing)

    def plan_rest(self, plan: Plan, settings: FetchSettings) -> Plan:
        """After the fetch of ``plan.ranges``, return the plan for the other chunks that differ from the source's."""
        assert isinstance(self._known, Received), "only such data determines ranges"
        assert plan.ranges is not None, "the caller has received the ranges"
        manifest = plan.agreed.manifest_with_digests(settings)
        chunks = self._known.differing_chunks(manifest, plan.ranges)
        plan.restore.read_own(manifest.chunks.range_of(chunk, chunk + 1) for chunk in chunks)
        self._note_all_but(chunks)
        settings.timeouts.note_progress()
        return dataclasses.replace(plan, manifest=manifest, chunks=chunks)

    def own(self, restore: Restore) -> None:
        """Reference the memory of a fetch that does not call `plan`, so that `failed` can overwrite received data."""
        self._restore = restore

    def note(self, chunk: int) -> None:
        """Note that a chunk was received, again if the first one was damaged. Any thread may call this."""
        self._has_landed[chunk] = 1
        if self._restore is not None:
            self._restore.landed(chunk)

    def complete(self) -> None:
        """Drop all data, after a fetch has received the whole state."""
        self._known = self._restore = None
        self._has_landed = bytearray()
        self._was_touched = False

    def failed(self, error: BaseException, *, is_kept: bool) -> None:
        """Set the attributes of an error that report whether the fetch has overwritten the receiver's tensors.

        Args:
            error: The error of the fetch.
            is_kept: Whether the caller may resume the fetch with this data; otherwise this method discards the data.
        """
        is_touched = self._was_touched or (self._restore is not None and self._restore.destination_touched)
        if is_touched:
            # Errors of other packages, such as those of a device, need these attributes as well.
            error.destination_touched = True  # type: ignore[attr-defined]
        if is_kept:
            error.destination_kept = is_touched  # type: ignore[attr-defined]
            if self._restore is not None:
                self._restore.close()
            return
        try:
            self.discard()
        except BaseException as another:
            another.destination_touched = True  # type: ignore[attr-defined]
            raise

    def _move_to(self, manifest: Manifest, restore: Restore) -> list[int]:
        """Move received chunks to a new `Restore` with the same tensors, and return them. They are not verified yet."""
        earlier, landed = self._restore, self.landed()
        num_chunks = manifest.chunks.num_chunks
        if earlier is not None:
            self._was_touched = self._was_touched or earlier.destination_touched
            if not restore.adopt(earlier, is_landed=bool(landed)):
                if earlier.destination_touched:
                    earlier.poison()
                landed = []
            elif landed and self._chunks != manifest.chunks:
                landed = list(range(num_chunks))
        has_landed = bytearray(num_chunks)
        for chunk in landed:
            has_landed[chunk] = 1
        # A signal handler may raise between these assignments. A chunk that wrongly counts as received costs a digest.
        self._restore = restore
        self._chunks = manifest.chunks
        self._has_landed = has_landed
        return landed

    def _note_all_but(self, missing: Sequence[int]) -> None:
        has_landed = bytearray(b"\x01" * self._chunks.num_chunks)
        for chunk in missing:
            has_landed[chunk] = 0
        self._has_landed = has_landed


Known: TypeAlias = Received[Any] | PartialState | AllBut | Literal["into"] | None
"""Data that a fetch need not request: from an earlier fetch, from failed fetches, or in the tensors of ``into``."""


def _merged(ranges: Iterator[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
