"""States without an encoding are found at few boundaries, and unregistered gradients without reading those in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from manager.state.registration_check import EncodingCheck, check_averaged, check_registered
from manager.state.registry import StateRegistry


def test_states_that_come_one_by_one_are_looked_at_whenever_their_number_doubles() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(64)]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    registry, looks = StateRegistry(), []
    registry.register("optimizer", lambda _: None, lambda: looks.append(1) or optimizer.state_dict())  # type: ignore[func-returns-value]
    check = EncodingCheck(registry, ("replicated",))
    for parameter in parameters:
        check.check([optimizer])
        parameter.grad = torch.ones(1)
        optimizer.step()
    check.check([optimizer])
    assert 5 <= len(looks) <= 9


class _Unreadable(torch.nn.Parameter):
    """A parameter whose gradient another thread may be replacing."""

    @property
    def grad(self) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("expected the gradient not to be read")


def test_no_gradient_is_read_that_another_thread_may_be_replacing() -> None:
    other, module = StateRegistry(), torch.nn.Module()
    module.register_parameter("weight", _Unreadable(torch.zeros(3)))
    other.register_object("of another replica", module)
    alive = [_Unreadable(torch.zeros(4)), torch.nn.UninitializedParameter()]
    check_averaged(StateRegistry(), [], [torch.zeros(3)])
    assert len(alive) == 2


def test_other_threads_may_build_tuples_meanwhile() -> None:
    """A reference to an unfinished tuple makes CPython raise a SystemError in the thread that builds it."""
    registry, is_over = StateRegistry(), threading.Event()
    registry.register_object("model", torch.nn.Linear(2, 2))
    errors: list[SystemError] = []

    def items() -> Iterator[list[int]]:
        for number in range(50):
            yield [number]

    def build() -> None:
        while not is_over.is_set():
            try:
                tuple(items())
            except SystemError as error:
                errors.append(error)

    building = threading.Thread(target=build)
    building.start()
    try:
        for _ in range(5):
            check_registered(registry, [])
    finally:
        is_over.set()
        building.join()
    assert not errors
