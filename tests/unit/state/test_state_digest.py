"""The digest of a state tells states apart by any bit, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_tools import round_trip
from torch import nn

from ft_transport.state.state_digest import state_digest


def _state() -> dict[str, Any]:
    flat = torch.arange(6.0)
    return {"w": flat, "view": flat[2:4], "t": torch.ones(2, 3).t(), "n": [1, 2.0, {"a", "b"}], "e": torch.zeros(0)}


def test_equal_states_of_different_objects_have_one_digest() -> None:
    assert state_digest(_state()) == state_digest(_state()) == state_digest(round_trip(_state()))
    assert 0 <= state_digest(_state()) < 2**64


_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a bit of a tensor": lambda state: state["w"].view(torch.int32).bitwise_xor_(1),
    "a sign of zero": lambda state: state["w"][0].neg_(),
    "a dtype": lambda state: state.update(w=state["w"].view(torch.int32)),
    "a shape": lambda state: state.update(w=state["w"].view(2, 3)),
    "a stride": lambda state: state.update(t=state["t"].contiguous()),
    "a tie": lambda state: state.update(view=state["view"].clone()),
    "a parameter": lambda state: state.update(w=nn.Parameter(state["w"])),
    "a key": lambda state: state.update(w2=state.pop("w")),
    "an order": lambda state: state.update(w=state.pop("w")),
    "a container": lambda state: state.update(n=tuple(state["n"])),
    "a type of a number": lambda state: state["n"].__setitem__(0, True),
    "an empty tensor's shape": lambda state: state.update(e=torch.zeros(0, 2)),
}


@pytest.mark.parametrize("what", sorted(_CHANGES))
def test_any_difference_changes_the_digest(what: str) -> None:
    state = _state()
    _CHANGES[what](state)
    assert state_digest(state) != state_digest(_state())
    assert state_digest(OrderedDict(_state())) != state_digest(_state())


def test_a_single_element_of_any_stride_has_a_digest() -> None:
    assert state_digest(torch.arange(8.0)[::8]) == state_digest(torch.zeros(1))
