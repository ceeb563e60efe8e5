"""What a fetch had received when it failed, for another one to go on from."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ft_transport.errors import ConfigurationError
from ft_transport.http.late_digests import find_damaged
from ft_transport.settings import default_num_threads
from ft_transport.state.restore import Restore
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import Manifest


class PartialState:
    """A part of a state: an error of ``HTTPTransport.fetch(keep_partial=True)`` has it, and ``resume=`` takes it.

    It keeps the memory that was received into, the receiver's own tensors among it. Those hold a mixture of two states,
    and must not be used for anything until another fetch has ended well. Belongs to one thread at a time.

    Attributes:
        step: The step of the state that it is a part of.
        chunks: How that divides.
    """

    def __init__(self, manifest: Manifest, restore: Restore) -> None:
        self.step = manifest.step
        self.chunks: ChunkTable = manifest.chunks
        self._restore: Restore | None = restore
        self._has_landed = bytearray(manifest.chunks.num_chunks)

    @property
    def num_bytes(self) -> int:
        """How much has landed, in bytes."""
        return sum(end - start for start, end in (self.chunks.range_of(chunk, chunk + 1) for chunk in self.landed()))

    @property
    def is_touched(self) -> bool:
        """Whether bytes may have landed in the receiver's own tensors."""
        return self._restore is not None and self._restore.destination_touched

    def note(self, chunk: int) -> None:
        """A chunk has landed. Called by any thread."""
        self._has_landed[chunk] = 1

    def note_all_but(self, missing: Collection[int]) -> None:
        """All chunks but these are there."""
        self._has_landed = bytearray(b"\x01" * len(self._has_landed))
        for chunk in missing:
            self._has_landed[chunk] = 0

    def landed(self) -> Iterator[int]:
        """The chunks that have, ascending."""
        return (chunk for chunk, has_landed in enumerate(self._has_landed) if has_landed)

    def discard(self) -> None:
        """Gives it up: what had landed in the receiver's own tensors is overwritten with NaN patterns.

        Does nothing where another fetch has gone on from it. May be called twice.
        """
        restore, self._restore = self._restore, None
        if restore is not None and restore.destination_touched:
            restore.poison()

    def require_unused(self) -> None:
        """Makes sure that nothing has gone on from it yet.

        Raises:
            ConfigurationError: Something has, and what it kept is not its own any more.
        """
        if self._restore is None:
            raise ConfigurationError("expected a partial state that no fetch has gone on from, as resume")

    def continued_by(self, manifest: Manifest, restore: Restore) -> list[int]:
        """Hands its memory on to a new restore; from here on this is used up.

        Args:
            manifest: Of what will be received; the tensors need not be those of the same step.
            restore: For that. It takes the memory over if each tensor belongs to the same place; else what has landed
                in the receiver's own tensors is overwritten with NaN patterns.

        Returns:
            The chunks of ``manifest`` that may be there already.
        """
        self.require_unused()
        earlier = self._restore
        assert earlier is not None, "it is unused"
        candidates = list(self.landed())
        if not restore.adopt(earlier, is_landed=bool(candidates)):
            self.discard()
            return []
        self._restore = None
        if candidates and self.chunks != manifest.chunks:
            return list(range(manifest.chunks.num_chunks))
        return candidates


@dataclass(slots=True)
class Kept:
    """The part of a state that a fetch has at the moment, over all its attempts.

    Attributes:
        partial: Of the last attempt that came so far; ``None`` if none did.
        is_offered: Whether the caller wants it where the fetch fails.
        was_touched: Whether bytes of an attempt may have landed in the receiver's own tensors.
    """

    partial: PartialState | None
    is_offered: bool
    was_touched: bool = False

    def continued_by(self, manifest: Manifest, restore: Restore) -> tuple[PartialState, list[int]]:
        """What takes the place of the present part, and the chunks that may be there already."""
        earlier = self.partial
        if earlier is not None and earlier.is_touched:
            self.was_touched = True
        candidates = earlier.continued_by(manifest, restore) if earlier is not None else []
        self.partial = PartialState(manifest, restore)
        return self.partial, candidates

    def failed(self, error: BaseException) -> None:
        """Has the error carry what has landed, or makes sure that nobody trains on it."""
        partial = self.partial
        if partial is None:
            return
        if partial.is_touched or self.was_touched:
            self.was_touched = True
            # Errors that are not of this package, such as those of a device, have to say so as well.
            error.destination_touched = True  # type: ignore[attr-defined]
        if self.is_offered:
            error.partial = partial  # type: ignore[attr-defined]
            return
        self.partial = None
        try:
            partial.discard()
        except BaseException as another:
            another.destination_touched = True  # type: ignore[attr-defined]
            raise


def find_missing(manifest: Manifest, restore: Restore, candidates: list[int]) -> list[int]:
    """The chunks that have to be fetched: all but those of the candidates whose bytes have the digest they should.

    Args:
        manifest: With digests.
        restore: Where they lie.
        candidates: Ascending; all others are missing.
    """
    there = set(candidates)
    there.difference_update(
        find_damaged(manifest, restore.present, num_threads=default_num_threads(), chunks=candidates)
    )
    return [chunk for chunk in range(manifest.chunks.num_chunks) if chunk not in there]
