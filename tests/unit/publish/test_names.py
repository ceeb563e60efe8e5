"""What a trainer calls its tensors, and what an engine calls them."""

from typing import Any

import pytest
import torch
from torch import nn

from ft_transport import PublishError
from ft_transport.publish.names import check_engine_names, engine_names, shown, unwrapped


def test_names_lose_what_wraps_their_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = torch.compile(nn.ModuleDict({"body": torch.compile(model, backend="eager")}), backend="eager")
    assert list(unwrapped(wrapped.state_dict())) == ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PublishError, match=r"layer\.weight") as refused:
        unwrapped({"layer.weight": 1, "_orig_mod.layer.weight": 2})
    assert refused.value.path == "_orig_mod.layer.weight"


@pytest.mark.parametrize(
    "names",
    [{"a.w": "b.w", "value.w": None}, lambda name: None if name == "value.w" else name.replace("a.", "b.")],
    ids=["table", "function"],
)
def test_names_become_those_of_the_engine_and_none_leaves_out(names: Any) -> None:
    assert engine_names(["a.w", "c.w", "value.w"], names) == {"a.w": "b.w", "c.w": "c.w", "value.w": None}


@pytest.mark.parametrize(
    "names", [{"a": "c", "b": "c"}, {"a": "b"}, lambda _: "c"], ids=["table", "one that keeps its name", "function"]
)
def test_two_tensors_with_one_engine_name_are_refused(names: Any) -> None:
    with pytest.raises(PublishError, match=r"engine's name .*, got another one beside a") as refused:
        engine_names(["a", "b"], names)
    assert refused.value.path == "b"


@pytest.mark.parametrize("new", ["", 3, b"b"], ids=repr)
def test_what_is_no_name_is_refused(new: Any) -> None:
    with pytest.raises(PublishError, match="expected a name, or None to leave the tensor out, got") as refused:
        engine_names(["a"], lambda _: new)
    assert refused.value.path == "a"


def test_ranks_may_hold_different_tensors_of_one_table() -> None:
    table: dict[str, str | None] = {"a": "x", "b": "y", "c": None}
    check_engine_names([{"a": "x", "c": None}, {"b": "y", "a": "x"}], table)
    with pytest.raises(PublishError, match=r"expected a table with the trainer's names alone, no rank has b, c"):
        check_engine_names([{"a": "x"}, {"a": "x"}], table)


def test_ranks_whose_functions_say_otherwise_are_refused() -> None:
    with pytest.raises(PublishError, match="expected one name on all ranks, got 'y' on rank 1 and 'x' before"):
        check_engine_names([{"a": "x"}, {"a": "y"}], str.upper)
    with pytest.raises(PublishError, match="expected one tensor for the engine's name x, got another one beside a"):
        check_engine_names([{"a": "x"}, {"b": "x"}], str.upper)


def test_of_many_names_a_few_are_shown() -> None:
    assert shown(["a", "b"]) == "a, b"
    assert shown([str(number) for number in range(8)]) == "0, 1, 2, 3, 4 and 3 more"
