"""What a user of the registry, and a reader of its errors, can rely on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from manager.errors import RegistryError
from manager.state.registry import StateEntry, StateRegistry


class _Part:
    """Something with a state, that writes down what is loaded into it."""

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self.name = name
        self.state: dict[str, Any] = {"value": 0}
        self.log = log if log is not None else []

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log.append(self.name)
        self.state = dict(state)


def _registry(*names: str) -> tuple[StateRegistry, dict[str, _Part], list[str]]:
    log: list[str] = []
    registry = StateRegistry()
    parts = {name: _Part(name, log) for name in names}
    for name, part in parts.items():
        registry.register_object(name, part)
    return registry, parts, log


def test_state_of_one_replica_loads_into_another_in_order_of_registration() -> None:
    source, parts, _ = _registry("model", "optimizer", "scheduler")
    parts["optimizer"].state["value"] = 7
    target, received, log = _registry("scheduler", "model", "optimizer")
    target.load_state_dict(source.state_dict())
    assert received["optimizer"].state == {"value": 7}
    assert log == ["scheduler", "model", "optimizer"]


def test_scopes_are_kept_apart() -> None:
    registry, parts, log = _registry("model")
    loader = _Part("loader", log)
    registry.register_object("loader", loader, scope="local", on_training_thread=True)
    assert list(registry.state_dict()) == ["model"]
    assert list(registry.state_dict("local")) == ["loader"]
    registry.load_state_dict({"loader": {"value": 3}}, scope="local")
    assert log == ["loader"]
    assert parts["model"].state == {"value": 0}
    assert [entry.key for entry in registry.entries()] == ["model", "loader"]
    (entry,) = registry.entries("local")
    assert isinstance(entry, StateEntry)
    assert entry.scope == "local"
    assert entry.on_training_thread


def test_bad_arguments_are_refused() -> None:
    registry = StateRegistry()
    with pytest.raises(RegistryError, match="non-empty"):
        registry.register_object("", _Part("x"))
    with pytest.raises(TypeError, match="str as key"):
        registry.register_object(3, _Part("x"))  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="'replicated' or 'local' for state 'x', got 'global'"):
        registry.register_object("x", _Part("x"), scope="global")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable as state_dict of state 'x', got dict"):
        registry.register("x", print, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="under key 'x', got list, which has no load_state_dict and no state_dict"):
        registry.register_object("x", [])
    assert registry.entries() == ()


def test_failing_state_function_is_named() -> None:
    registry, _, _ = _registry("model")
    registry.register("optimizer", lambda _: None, lambda: {}["lr"])
    with pytest.raises(RegistryError, match=r"state_dict of 'optimizer'.*KeyError: 'lr'") as caught:
        registry.state_dict()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.keys == ("optimizer",)


def test_swapped_functions_are_refused_by_a_message_that_says_so() -> None:
    model, part = torch.nn.Linear(2, 2), _Part("part")
    optimizer = torch.optim.SGD(model.parameters())
    registry = StateRegistry()
    for swapped in (model, optimizer, part):
        with pytest.raises(
            RegistryError, match=r"look swapped: the order .* key, load_state_dict, state_dict"
        ) as caught:
            registry.register("part", swapped.state_dict, swapped.load_state_dict)
        assert caught.value.keys == ("part",)
        registry.register(f"the {type(swapped).__name__}", swapped.load_state_dict, swapped.state_dict)


def test_a_function_that_cannot_be_called_as_it_will_be_is_refused() -> None:
    registry = StateRegistry()
    with pytest.raises(RegistryError, match=r"state 'part'; got .*<lambda>\(\) and .*<lambda>\(\): the order"):
        registry.register("part", lambda: None, lambda: {})  # type: ignore[arg-type, misc]
    with pytest.raises(RegistryError, match=r"got .*<lambda>\(_\) and .*<lambda>\(state\): the order"):
        registry.register("part", lambda _: None, lambda state: state)  # type: ignore[arg-type, misc]
    assert registry.entries() == ()


def test_swapped_functions_without_signatures_are_told_at_the_first_call() -> None:
    # Neither shows a signature, and neither takes what it is called with.
    registry = StateRegistry()
    registry.register("clock", time.localtime, getattr)
    with pytest.raises(
        RegistryError, match=r"TypeError: getattr expected .* \(the order of the arguments is key, load"
    ):
        registry.state_dict()


def test_an_error_inside_a_state_function_is_no_matter_of_the_order() -> None:
    registry = StateRegistry()
    registry.register("part", lambda _: None, lambda: len(3))  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match=r"TypeError: object of type 'int' has no len") as caught:
        registry.state_dict()
    assert "order" not in str(caught.value)
