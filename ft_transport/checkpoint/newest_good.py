"""Which checkpoint to load where the newest ones may be damaged, and another process may be deleting them; pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ft_transport.errors import CheckpointDamagedError, CheckpointNotFoundError

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_GONE: Final = 10
"""So many checkpoints may go away while a good one is looked for."""


def load_newest_good(list_steps: Callable[[], Sequence[int]], load: Callable[[int], T]) -> T | None:
    """Tries checkpoints from the newest to the oldest.

    Args:
        list_steps: The steps that there are, ascending. Called before each attempt: while one checkpoint is read,
            another process may save newer ones and delete it.
        load: Loads the checkpoint of a step.

    Returns:
        What ``load`` returned; ``None`` if there is no checkpoint.

    Raises:
        CheckpointDamagedError: There are some, and all are damaged.
        CheckpointNotFoundError: They go away faster than they are read, or the last one did when it was read in part.
    """
    damaged: dict[int, CheckpointDamagedError] = {}
    gone: list[CheckpointNotFoundError] = []
    while len(gone) < MAX_GONE and (left := [step for step in list_steps() if step not in damaged]):
        step = left[-1]
        try:
            return load(step)
        except CheckpointDamagedError as error:
            logger.warning("step %d: the checkpoint is damaged, an older one is tried: %s", step, error)
            damaged[step] = error
        except CheckpointNotFoundError as error:
            logger.warning("step %d: the checkpoint is gone, another one is tried: %s", step, error)
            gone.append(error)
    failures = [*damaged.values(), *gone]
    is_touched = any(error.destination_touched for error in failures)
    if damaged or is_touched or len(gone) == MAX_GONE:
        failures[0].destination_touched = is_touched
        raise failures[0]
    return None
