"""Finds the memory of optimizers' tensors, detects changes of tensors, and loads optimizers' states bit for bit.

Memory addresses identify the tensors that only an optimizer's step or a write section should change. Other code may
change these tensors nevertheless: ``nn.Embedding(max_norm=…)``, a clipping hook or a custom ``forward`` writes
parameters in place. torch counts such changes in ``Tensor._version``, and `VersionWatch` detects them. It does not
detect writes through ``Tensor.data``.

``Optimizer.load_state_dict`` alone does not restore a state exactly. It casts every tensor to the dtype of its
floating-point parameter, turns all mappings into plain dicts, drops the bound of a deque, and replaces a str by the
text of a generator. It fails for named tuples, numpy arrays and other iterables that a generator cannot construct. So
an optimizer with bfloat16 parameters and states in float32 could not load its own state. `exact_loading` corrects this.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch
from torch.optim import Optimizer

MIN_DEFERRED_BYTES: Final = 64 << 10
"""Tensors below this size are copied at the boundary: to pass them to another thread would take as long."""

Memory: TypeAlias = tuple[torch.device, int, int]
"""A tensor's memory: device, address, length in bytes."""

_version = attrgetter("_version")


def belongs_to(guarded: Set[Memory], at_least_bytes: int = MIN_DEFERRED_BYTES) -> Callable[[torch.Tensor], bool]:
    """Return a predicate of a tensor: whether it has at least ``at_least_bytes``, and its memory is in ``guarded``.

    An overlap with guarded memory is not enough: other code may change another part of the same storage.
    """

    def belongs(tensor: torch.Tensor) -> bool:
        return tensor.nbytes >= at_least_bytes and memory_at(tensor) in guarded

    return belongs


def memory_of_optimizers(optimizers: Iterable[Optimizer]) -> set[Memory]:
    """Return the memory of the optimizers' parameters and states."""
    return set(filter(None, map(memory_at, _tensors_of_optimizers(optimizers))))


def storages_of_optimizers(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the addresses of the storages of the optimizers' parameters and states."""
    return set(filter(None, map(storage_of, _tensors_of_optimizers(optimizers))))


def parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return the optimizers' parameters."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the values of each parameter group, without its parameters."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else copy(value)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the values of each parameter group. An entry ``params`` is ignored."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for name, value in values.items():
            own = group.get(name)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
                own.copy_(value)  # A scheduler or a CUDA graph may refer to it.
            elif name != "params":
                group[name] = value


def memory_of(parts: Iterable[object]) -> set[Memory]:
    """Return the memory of the tensors in nested mappings, lists and tuples."""
    return set(filter(None, map(memory_at, tensors_in(list(parts)))))


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the tensor's storage, which views may share; ``None`` if it has none."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and tensors that wrap others
        return None


def memory_at(tensor: torch.Tensor) -> Memory | None:
    """Return the memory of a tensor, or of a DTensor's local shard; ``None`` if it has no memory of its own."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.device, local.data_ptr(), local.nbytes
    except RuntimeError:  # sparse tensors, and tensors that wrap others
        return None


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


class VersionWatch:
    """Detects in-place changes of tensors since this object was made. Costs 0.1 to 0.5 µs for each tensor.

    Args:
        tensors: The tensors. Pass DTensors themselves, because the versions of their local shards do not change.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions = _versions_of(tensors)

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors that have changed since this object was made."""
        versions = _versions_of(self._tensors)
        if versions == self._versions:
            return []
        return [
            tensor
            for tensor, before, after in zip(self._tensors, self._versions, versions, strict=True)
            if before != after
        ]


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # inference tensors have no version
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _tensors_of_optimizers(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for values in optimizer.state.values():
            yield from tensors_in(values)


_MAX_DEPTH: Final = 4
"""Maximum depth of nested objects and containers in which `trained_by` searches."""
_MAX_PARTS: Final = 1000
"""Maximum number of objects that `trained_by` examines."""


@contextmanager
def exact_loading(load_state_dict: Callable[[Any], object], optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Return a context in which ``Optimizer.load_state_dict`` restores states exactly.

    The context does not affect optimizers whose own ``load_state_dict`` does not call torch's. A user's load hooks run
    as usual.

    Args:
        load_state_dict: The function that will be called inside the context. If it is a method of an
            optimizer, the context covers that optimizer, and also the optimizers to which it refers (`trained_by`).
        optimizers: Further optimizers that the function may load.
    """
    load = _ExactLoad()
    try:
        with ExitStack() as hooks:
            found = (*optimizers, *trained_by(load_state_dict))
            for optimizer in {id(each): each for each in found if isinstance(each, Optimizer)}.values():
                # A wrapper may have the class of an optimizer, but not its attributes.
                if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
                    hooks.callback(optimizer.register_load_state_dict_pre_hook(load.before).remove)
                    hooks.callback(optimizer.register_load_state_dict_post_hook(load.after, prepend=True).remove)
            yield
    finally:
        # If a signal handler raised, a hook may remain on an optimizer. It must not do anything later.
        load.is_over = True


class _ExactLoad:
    """Load hooks that remember the state passed to torch's loader, and restore values that the loader has changed.

    Attributes:
        is_over: Whether the context has ended. After its end, the hooks do nothing.
    """

    def __init__(self) -> None:
        self._given: dict[Optimizer, Mapping[str, Any]] = {}
        self.is_over = False

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.is_over:
            return state_dict
        self._given[optimizer] = state_dict
        # States that belong to no parameter are passed on, because the loader does not change them.
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
    """Stands in for a value that torch's loader cannot construct."""


def _loadable(value: Any) -> Any:
    """Return ``value`` with stand-ins for objects that torch's loader cannot construct.

    Tensors have no stand-ins: the loader moves them to the parameter's device.
    """
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
    """Choose between the received value (``given``) and the value that torch's loader made of it (``loaded``).

    If the loader has changed dtype or class, the received value is right. Otherwise the loaded value is right: the
    optimizer may have made it.
    """
    match given:
        case _ if isinstance(loaded, _Sealed):
            return given
        case tuple() if _is_named_tuple(given) and type(loaded) is tuple and len(given) == len(loaded):
            # Not by the class's constructor, which may have other arguments.
            return tuple.__new__(type(given), (_as_given(*pair) for pair in zip(given, loaded, strict=True)))
        case torch.Tensor() if isinstance(loaded, torch.Tensor) and type(given) is type(loaded):
            is_cast = given.dtype != loaded.dtype and given.shape == loaded.shape
            return given.to(loaded.device) if is_cast else loaded
        case dict() if isinstance(loaded, dict):
            # A copy has the same class and default factory.
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
    """Yield the optimizers and modules to which a function refers. The object of a method is searched, too."""
    try:
        named = inspect.getclosurevars(function)
        referred = [*named.nonlocals.values(), *named.globals.values()]
    # Raised if it is not a Python function, or if one of its variables has no value yet.
    except (TypeError, ValueError):
        referred = []
    budget = [_MAX_PARTS]
    for each in (getattr(function, "__self__", None), *referred):
        yield from _trained_in(each, _MAX_DEPTH, budget)


def _trained_in(holder: object, depth: int, budget: list[int]) -> Iterator[Optimizer | torch.nn.Module]:
    """Yield the optimizers and modules in an object; ``budget[0]`` is the number of objects left to examine."""
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
    # Long lists, such as a data loader's samples, are not searched.
    if not depth or len(parts) > budget[0]:
        return
    budget[0] -= len(parts)
    for part in parts:
        yield from _trained_in(part, depth - 1, budget)
