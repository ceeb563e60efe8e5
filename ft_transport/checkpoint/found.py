"""Checkpoints that the first rank has found, and the choice of the newest one that is not damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from ft_transport.checkpoint.files import CheckpointFiles, files_at
from ft_transport.errors import CheckpointDamagedError, CheckpointNotFoundError

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_GONE: Final = 10
"""Number of checkpoints that other processes may delete during `load_newest_good` before it raises an error."""


class FoundCheckpoint(Struct, frozen=True, array_like=True, kw_only=True):
    """A complete checkpoint that the first rank has found; the same on all ranks.

    Attributes:
        step: The step of the checkpoint.
        location: Location of the checkpoint (``files``).
        identity: A text that differs after the checkpoint was replaced.
    """

    step: int
    location: str
    identity: str

    @property
    def files(self) -> CheckpointFiles:
        """The files of the checkpoint."""
        return files_at(self.location)


class Candidate(NamedTuple):
    """A complete checkpoint.

    Attributes:
        step: The step.
        is_own: Whether it lies in the root, and not in the bucket of uploaded copies.
    """

    step: int
    is_own: bool


def load_newest_good(list_candidates: Callable[[], Sequence[Candidate]], load: Callable[[Candidate], T]) -> T | None:
    """Load the newest checkpoint that is not damaged.

    Args:
        list_candidates: Returns the existing checkpoints, the best one last. Called before each attempt, because
            another process may save and delete checkpoints during an attempt.
        load: Loads a checkpoint.

    Returns:
        The result of ``load``; ``None`` if no checkpoint exists.

    Raises:
        CheckpointDamagedError: All existing checkpoints are damaged.
        CheckpointNotFoundError: Other processes deleted `MAX_GONE` checkpoints during the call.
    """
    damaged: dict[Candidate, CheckpointDamagedError] = {}
    gone: list[CheckpointNotFoundError] = []
    while len(gone) < MAX_GONE and (left := [each for each in list_candidates() if each not in damaged]):
        candidate = left[-1]
        try:
            return load(candidate)
        except CheckpointDamagedError as error:
            logger.warning("step %d: the checkpoint is damaged, trying another one: %s", candidate.step, error)
            damaged[candidate] = error
        except CheckpointNotFoundError as error:
            logger.warning(
                "step %d: another process deleted the checkpoint, trying another one: %s", candidate.step, error
            )
            gone.append(error)
    failures = [*damaged.values(), *gone]
    is_touched = any(error.destination_touched for error in failures)
    if damaged or is_touched or len(gone) == MAX_GONE:
        failures[0].destination_touched = is_touched
        raise failures[0]
    return None
