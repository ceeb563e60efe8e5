"""Optimizers load their state bit for bit, where torch's own loader rounds it.

``Optimizer.load_state_dict`` casts every tensor of a state to the dtype of its floating-point parameter, makes plain
dicts of all mappings, drops the bound of a deque and turns a str into the text of a generator. It fails at named
tuples, numpy arrays and other iterables that no generator makes. An optimizer over bfloat16 parameters that keeps
states in float32 or int8 could otherwise never take its own state back.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import chain
from types import ModuleType
from typing import Any, Final

import torch
from torch.optim import Optimizer

_MAX_DEPTH: Final = 4
"""How many objects and containers around an optimizer are searched."""
_MAX_PARTS: Final = 1000


@contextmanager
def exact_loading(load_state_dict: Callable[[Any], object], optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Return a section in which torch's loader leaves in the optimizers exactly the state that it received.

    Classes with a loader of their own that does not call torch's load in their own way. A user's hooks run before and
    after this as they do without it.

    Args:
        load_state_dict: The function that is about to load. The optimizers are found that it belongs to or refers to.
        optimizers: Other optimizers that it may load.
    """
    load = _ExactLoad()
    try:
        with ExitStack() as hooks:
            found = (*optimizers, *trained_by(load_state_dict))
            for optimizer in {id(each): each for each in found if isinstance(each, Optimizer)}.values():
                # A wrapper may be an optimizer by its class alone.
                if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
                    hooks.callback(optimizer.register_load_state_dict_pre_hook(load.before).remove)
                    hooks.callback(optimizer.register_load_state_dict_post_hook(load.after, prepend=True).remove)
            yield
    finally:
        # Where a signal handler raised, a hook may stay on an optimizer.
        load.is_over = True


class _ExactLoad:
    """Notes what torch's loader is about to take, and puts back whatever the loader has changed or could not make.

    Attributes:
        is_over: Its hooks do nothing from then on.
    """

    def __init__(self) -> None:
        self._given: dict[Optimizer, Mapping[str, Any]] = {}
        self.is_over = False

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.is_over:
            return state_dict
        self._given[optimizer] = state_dict
        # What belongs to no parameter, the loader takes as it is.
        indices = set(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        states = state_dict["state"].items()
        return {**state_dict, "state": {key: _loadable(each) if key in indices else each for key, each in states}}

    def after(self, optimizer: Optimizer) -> None:
        given = self._given.pop(optimizer, None)
        if given is None or self.is_over:
            return
        indices = chain.from_iterable(group["params"] for group in given["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, parameter in zip(indices, parameters, strict=True):
            if index in given["state"]:
                optimizer.state[parameter] = _as_given(given["state"][index], optimizer.state[parameter])


class _Sealed:
    """Stands for a value that torch's loader would fail to make again."""


def _loadable(value: Any) -> Any:
    """Return what torch's loader takes in place of ``value``; it still moves tensors to the parameter's device."""
    if isinstance(value, dict):
        return {key: _loadable(each) for key, each in value.items()}
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return (list if isinstance(value, list) else tuple)(map(_loadable, value))
    if type(value) is deque:
        return deque(map(_loadable, value), value.maxlen)
    is_known = isinstance(value, (torch.Tensor, str, bytes, bytearray)) or not isinstance(value, Iterable)
    return value if is_known else _Sealed()


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _as_given(given: Any, loaded: Any) -> Any:
    """Return ``given`` where torch's loader has changed it, and ``loaded`` where the optimizer has made its own."""
    match given:
        case _ if isinstance(loaded, _Sealed):
            return given
        case tuple() if _is_named_tuple(given) and type(loaded) is tuple and len(given) == len(loaded):
            # A class may have a constructor of its own.
            return tuple.__new__(type(given), (_as_given(*pair) for pair in zip(given, loaded, strict=True)))
        case torch.Tensor() if isinstance(loaded, torch.Tensor) and type(given) is type(loaded):
            is_cast = given.dtype != loaded.dtype and given.shape == loaded.shape
            return given.to(loaded.device) if is_cast else loaded
        case dict() if isinstance(loaded, dict):
            # The copy has the class, and the default factory.
            items = {key: _as_given(given[key], value) if key in given else value for key, value in loaded.items()}
            same_kind = copy(given)
            same_kind.clear()
            same_kind.update(items)
            return same_kind
        case list() | tuple() | deque() if type(given) is type(loaded) and len(given) == len(loaded):
            values = [_as_given(*pair) for pair in zip(given, loaded, strict=True)]
            return deque(values, given.maxlen) if isinstance(given, deque) else type(given)(values)
        case str() if isinstance(loaded, str):
            return given
        case _:
            return loaded


def trained_by(function: Callable[[Any], object]) -> Iterator[Optimizer | torch.nn.Module]:
    """Yield the optimizers and modules that a method's object is or has, or that a function refers to."""
    try:
        named = inspect.getclosurevars(function)
        referred = [*named.nonlocals.values(), *named.globals.values()]
    # No Python function, or a variable of it has no value yet.
    except (TypeError, ValueError):
        referred = []
    budget = [_MAX_PARTS]
    for each in (getattr(function, "__self__", None), *referred):
        yield from _trained_in(each, _MAX_DEPTH, budget)


def _trained_in(holder: object, depth: int, budget: list[int]) -> Iterator[Optimizer | torch.nn.Module]:
    """Yield what is trained in an object; ``budget`` holds how many further parts are looked at in all."""
    if isinstance(holder, (Optimizer, torch.nn.Module)):
        yield holder
    match holder:
        case torch.nn.Module() | type() | ModuleType():
            return
        case dict():
            parts = list(holder.values())
        case list() | tuple():
            parts = list(holder)
        case _ if hasattr(holder, "load_state_dict"):
            parts = list(getattr(holder, "__dict__", {}).values())
        case _:
            return
    # A loader's list of samples has no optimizer.
    if not depth or len(parts) > budget[0]:
        return
    budget[0] -= len(parts)
    for part in parts:
        yield from _trained_in(part, depth - 1, budget)
