"""The parts of a state that a receiver already has, from earlier fetches, and the plan for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import torch

from ft_transport.errors import ConfigurationError
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
"""Fraction of the data above which a fetch takes all of it rather than the ranges that may have changed."""


def _nothing_changes(own: torch.Tensor) -> bool:
    """Report that no tensor has changed since an earlier fetch."""
    del own
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[T]):
    """A state that arrived whole and verified, and its committed step.

    Attributes:
        step: The step.
        state: The state.
        num_bytes_fetched: Bytes of data from peers, over the network or out of the memory of a peer on this host;
            ``None`` if they were not counted.
    """

    step: int
    state: T
    _manifest: Manifest
    num_bytes_fetched: int | None = None
    _is_changing: Callable[[torch.Tensor], bool] = _nothing_changes

    def differences(self, state: object) -> tuple[str, ...]:
        """Return where ``state`` differs, bit for bit, from what was sent, whatever load functions have made of it.

        Reads every byte of it once, and sends nothing.

        Args:
            state: The receiver's state after loading. Nothing may change it meanwhile.

        Returns:
            Paths, each with its difference; empty if nothing differs.

        Raises:
            UnsupportedLeafError: A leaf of ``state`` has no safe encoding.
            ConfigurationError: It was fetched without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise ConfigurationError("expected a state that was fetched with is_comparable=True")
        return find_differences(self._manifest, state, num_threads=default_num_threads())

    def but_for(self, is_changing: Callable[[torch.Tensor], bool]) -> Received[T]:
        """Return this state for the ``known=`` of a later fetch, without tensors that have changed since this one.

        Args:
            is_changing: Returns whether one of the receiver's tensors may have changed, here or at the source.
        """
        return dataclasses.replace(self, _is_changing=is_changing)

    def changed_ranges(self, manifest: Manifest, restore: Restore) -> list[Range] | None:
        """Return the bytes of a later state that may differ; ``None`` if a fetch of everything costs less.

        Args:
            manifest: Manifest of the later state.
            restore: Has the receiver's tensors.
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
        """Return the chunks outside of ``ranges`` whose digests differ from those of this state.

        Args:
            manifest: Manifest of the later state, with digests.
            ranges: The bytes that have been fetched.
        """
        before, now = self._manifest.digests, manifest.digests
        assert before is not None, "ranges were planned with them"
        assert now is not None, "the source was asked for them"
        chunk_bytes = manifest.chunks.chunk_bytes
        fetched = {chunk for start, end in ranges for chunk in range(start // chunk_bytes, -(-end // chunk_bytes))}
        return [
            chunk
            for chunk, (old, new) in enumerate(zip(before, now, strict=True))
            if old != new and chunk not in fetched
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The requests of a fetch.

    Attributes:
        manifest: Manifest of the state; with digests if the plan needed them.
        chunks: The missing chunks, ascending.
        ranges: Bytes to fetch before the chunks; ``None`` unless an earlier fetch determines them.
    """

    manifest: Manifest
    chunks: Sequence[int]
    ranges: Sequence[Range] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of data that the plan fetches."""
        num_bytes = sum(end - start for start, end in self.ranges or ())
        return num_bytes + sum(map(self.manifest.chunks.length_of, self.chunks))


class PartialState:
    """The data of states that did not arrive whole; ``known=`` of ``HTTPTransport.fetch`` fills it.

    A fetch that fails leaves here what has landed. The next fetch, from any source, digests it again and fetches the
    rest. Meanwhile the receiver's tensors hold a mixture of two states: use them for nothing until a fetch succeeds or
    `discard` has overwritten them. A fetch that succeeds empties it. It owns the memory that was received into, and one
    thread at a time uses it.

    Args:
        known: The receiver's data before the first of these fetches; see ``HTTPTransport.fetch``.

    Raises:
        ConfigurationError: ``known`` is no such value.
    """

    def __init__(self, known: Received[Any] | Literal["into"] | None = None) -> None:
        if not (known is None or known == "into" or isinstance(known, Received)):
            raise ConfigurationError(
                f'expected a Received, a PartialState, "into" or None as known, got {type(known).__name__} {known!r}'
            )
        self._known = known
        self._chunks = ChunkTable(data_bytes=0, chunk_bytes=1)
        self._has_landed = bytearray()
        self._restore: Restore | None = None
        self._was_touched = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes that have landed."""
        return sum(map(self._chunks.length_of, self.landed()))

    def landed(self) -> list[int]:
        """Return the chunks that have landed, ascending."""
        return [chunk for chunk, has_landed in enumerate(self._has_landed) if has_landed]

    def discard(self) -> None:
        """Empty it, and overwrite the receiver's own tensors with NaN patterns if bytes have landed there."""
        restore = self._restore
        self.complete()
        if restore is not None and restore.destination_touched:
            restore.poison()

    def plan(self, agreed: AgreedSources, restore: Restore, settings: FetchSettings) -> Plan:
        """Compare the known data with the sources' manifest, and own the memory of ``restore`` from now on.

        Raises:
            TransportError: The sources did not send the digests.
        """
        manifest, known = agreed.manifest, self._known
        every = range(manifest.chunks.num_chunks)
        present: Sequence[int] = self._move_to(manifest, restore)
        # A failed attempt may have overwritten a part of what an earlier fetch brought.
        if known == "into" or (known is not None and self._was_touched and not present):
            present = every
        elif isinstance(known, Received) and not present:
            ranges = known.changed_ranges(manifest, restore)
            if ranges is not None:
                return Plan(manifest=manifest, chunks=(), ranges=ranges)
        missing: Sequence[int] = every
        if present:
            manifest = agreed.manifest_with_digests(settings)
            restore.read_own(manifest.chunks.range_of(chunk, chunk + 1) for chunk in present)
            damaged = find_damaged(manifest, restore.present, num_threads=default_num_threads(), chunks=list(present))
            there = set(present).difference(damaged)
            missing = [chunk for chunk in every if chunk not in there]
        self._note_all_but(missing)
        settings.timeouts.note_progress()
        return Plan(manifest=manifest, chunks=missing)

    def plan_rest(self, plan: Plan, agreed: AgreedSources, restore: Restore, settings: FetchSettings) -> Plan:
        """Return the plan for the rest, once the ranges have landed: the chunks that differ at the source."""
        assert isinstance(self._known, Received), "it said the ranges"
        assert plan.ranges is not None, "they have landed"
        manifest = agreed.manifest_with_digests(settings)
        chunks = self._known.differing_chunks(manifest, plan.ranges)
        restore.read_own(manifest.chunks.range_of(chunk, chunk + 1) for chunk in chunks)
        self._note_all_but(chunks)
        settings.timeouts.note_progress()
        return Plan(manifest=manifest, chunks=chunks, ranges=plan.ranges)

    def note(self, chunk: int) -> None:
        """Note that a chunk has landed. Called by any thread."""
        self._has_landed[chunk] = 1

    def complete(self) -> None:
        """Empty it: the state is whole."""
        self._known = self._restore = None
        self._has_landed = bytearray()
        self._was_touched = False

    def failed(self, error: BaseException, *, is_kept: bool) -> None:
        """Mark the error of a fetch whose bytes may have landed in the receiver's own tensors.

        Args:
            error: The error.
            is_kept: Whether this data stays for the next fetch; else it is discarded.
        """
        is_touched = self._was_touched or (self._restore is not None and self._restore.destination_touched)
        if is_touched:
            # Errors of other packages, such as those of a device, need these attributes as well.
            error.destination_touched = True  # type: ignore[attr-defined]
        if is_kept:
            error.destination_kept = is_touched  # type: ignore[attr-defined]
            return
        try:
            self.discard()
        except BaseException as another:
            another.destination_touched = True  # type: ignore[attr-defined]
            raise

    def _move_to(self, manifest: Manifest, restore: Restore) -> list[int]:
        """Move landed data to a new restore, unless its tensors differ; return its chunks, to be verified."""
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
        # A signal handler may raise between these: chunks that count as landed without the memory cost a digest.
        self._restore = restore
        self._chunks = manifest.chunks
        self._has_landed = has_landed
        return landed

    def _note_all_but(self, missing: Sequence[int]) -> None:
        has_landed = bytearray(b"\x01" * self._chunks.num_chunks)
        for chunk in missing:
            has_landed[chunk] = 0
        self._has_landed = has_landed


Known: TypeAlias = Received[Any] | PartialState | Literal["into"] | None
"""Data that a fetch may skip: that of an earlier fetch, of failed ones, or most of ``into``."""


def _merged(ranges: Iterator[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
