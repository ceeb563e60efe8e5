"""Which checkpoint is loaded while others are damaged, and more are saved and deleted by another process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ft_transport.checkpoint.found import MAX_GONE, Candidate, load_newest_good
from ft_transport.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError


class Root:
    """What is there, and what happens while a step is read."""

    def __init__(self, *steps: int, damaged: tuple[int, ...] = ()) -> None:
        self.steps = list(steps)
        self.damaged = damaged
        self.while_reading: Callable[[int], None] = lambda _step: None
        self.is_touched = False
        self.tried: list[int] = []

    def load(self, step: int) -> int:
        self.tried.append(step)
        self.while_reading(step)
        error: CheckpointError | None = None
        if step not in self.steps:
            error = CheckpointNotFoundError("gone", step=step)
        elif step in self.damaged:
            error = CheckpointDamagedError("damaged", step=step)
        if error is not None:
            error.destination_touched = self.is_touched
            raise error
        return step

    def load_newest_good(self) -> int | None:
        return load_newest_good(
            lambda: [Candidate(step, is_own=True) for step in self.steps], lambda candidate: self.load(candidate.step)
        )


def test_the_newest_good_one_is_loaded_and_each_is_tried_once() -> None:
    root = Root(1, 2, 3, 4, damaged=(3, 4))
    assert root.load_newest_good() == 2
    assert root.tried == [4, 3, 2]


def test_there_may_be_none() -> None:
    assert Root().load_newest_good() is None


def test_where_all_are_damaged_the_error_is_that_of_the_newest() -> None:
    with pytest.raises(CheckpointDamagedError, match="step 2"):
        Root(1, 2, damaged=(1, 2)).load_newest_good()


def test_a_step_that_goes_away_while_it_is_read_has_a_successor() -> None:
    root = Root(1, 2)

    def prune(step: int) -> None:
        if step == 2:
            root.steps = [3, 4]

    root.while_reading = prune
    assert root.load_newest_good() == 4


def test_a_damaged_one_is_not_tried_again_after_another_has_gone_away() -> None:
    root = Root(1, 2, 3, damaged=(3,))

    def prune(step: int) -> None:
        if step == 2:
            root.steps.remove(2)

    root.while_reading = prune
    assert root.load_newest_good() == 1
    assert root.tried == [3, 2, 1]


def test_where_the_last_one_goes_away_there_is_none_unless_part_of_it_was_loaded() -> None:
    root = Root(1)
    root.while_reading = lambda _step: root.steps.clear()
    assert root.load_newest_good() is None
    root.steps, root.is_touched = [1], True
    with pytest.raises(CheckpointNotFoundError) as caught:
        root.load_newest_good()
    assert caught.value.destination_touched


def test_the_error_says_that_something_was_loaded_whichever_attempt_it_was() -> None:
    root = Root(1, 2, damaged=(1, 2))

    def touch(step: int) -> None:
        root.is_touched = step == 1

    root.while_reading = touch
    with pytest.raises(CheckpointDamagedError, match="step 2") as caught:
        root.load_newest_good()
    assert caught.value.destination_touched


def test_checkpoints_that_go_away_faster_than_they_are_read_end_it() -> None:
    root = Root(1)

    def replace(step: int) -> None:
        root.steps = [step + 1]

    root.while_reading = replace
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        root.load_newest_good()
    assert len(root.tried) == MAX_GONE
