"""A collective counts as good only if its tensor is reduced, and needs no cyclic collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from manager import ManagedWork
from manager.collectives.managed_work import wait_all


class Done:
    """A collective that is over."""

    def wait(self) -> bool:
        return True


class Raising:
    """A collective that is ended by an exception."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> bool:
        raise self._error


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def begun(
    work: Any, reported: list[Exception], value: torch.Tensor | None = None, finish: Callable[[], object] = lambda: None
) -> ManagedWork:
    managed = ManagedWork(value if value is not None else torch.ones(2), reported.append)
    managed.begin(work, finish)
    return managed


def test_it_reports_what_went_wrong_and_runs_callbacks_where_it_is_waited_for() -> None:
    reported: list[Exception] = []
    finished: list[str] = []
    work = begun(Raising(RuntimeError("lost")), reported, finish=lambda: finished.append("finished"))
    assert not work.get_future().done()
    chained = work.get_future().then(lambda done: done.value().sum())
    assert not work.wait()
    assert [str(error) for error in reported] == ["lost"]
    assert not finished
    assert chained.wait() == 2.0
    late = work.get_future().then(lambda done: "late")
    assert late.wait() == "late"


def test_a_callback_that_fails_spoils_a_collective_that_went_well() -> None:
    def fail(_: object) -> None:
        raise ValueError("callback")

    reported: list[Exception] = []
    work = begun(Done(), reported)
    work.get_future().add_done_callback(fail)
    work.synchronize()
    assert [str(error) for error in reported] == ["callback"]
    assert work.is_completed()
    assert not wait_all([begun(Done(), []), work])


def test_a_work_that_never_began_does_not_count() -> None:
    assert wait_all([begun(Done(), [])])
    assert not wait_all([begun(Done(), []), ManagedWork(torch.ones(1), lambda error: None)])


@pytest.mark.parametrize("place", ["collective", "average", "callback"])
def test_an_interruption_is_raised_and_the_collective_never_counts(place: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    reported: list[Exception] = []
    work = begun(
        Raising(KeyboardInterrupt()) if place == "collective" else Done(),
        reported,
        finish=interrupt if place == "average" else lambda: None,
    )
    future = work.get_future()
    following = future.then(interrupt if place == "callback" else lambda done: "after")
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert "KeyboardInterrupt interrupted the wait" in str(reported[0])
    assert not work.wait()
    assert not wait_all([work])
    # Nobody waits for ever for what will not come.
    assert torch.equal(future.wait(), torch.ones(2))
    if place == "callback":
        with pytest.raises(Exception, match="KeyboardInterrupt interrupted the wait"):
            following.wait()
    else:
        assert following.wait() == "after"


def test_a_callback_may_add_another_and_wait_for_it() -> None:
    work = begun(Done(), [])
    outcomes: list[Any] = []
    future = work.get_future()
    future.then(lambda done: outcomes.append(future.then(lambda again: again.value().sum().item()).wait()))
    assert work.wait()
    assert outcomes == [2.0]


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("error", [None, RuntimeError("lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_the_tensor_goes_with_the_last_reference_without_the_cyclic_collector(
    is_waited_for: bool, error: BaseException | None
) -> None:
    reported: list[Exception] = []

    def reduce() -> list[weakref.ref[Any]]:
        gradient = torch.ones(2)
        work = begun(Done() if error is None else Raising(error), reported, gradient, finish=lambda: gradient.div_(2))
        future = work.get_future()
        following = future.then(lambda done: done.value() + 1)
        if is_waited_for:
            with suppress(KeyboardInterrupt):
                work.wait()
        return [weakref.ref(each) for each in (gradient, work, future, following)]

    alive = [reference() for reference in reduce()]
    if isinstance(error, KeyboardInterrupt):
        # It was raised to the caller, with its frames.
        error.__traceback__ = None
    else:
        assert alive == [None] * 4
    del alive
