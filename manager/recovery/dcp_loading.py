"""Loads a replica's state from a checkpoint that another program wrote with ``torch.distributed.checkpoint`` (DCP).

DCP names each leaf of a state by its path. This module looks up the leaves of a registered state below the state's key.
Two other layouts are supported: models of torchtitan, without a key in front of the names; and optimizer states of
torchtitan and ``get_optimizer_state_dict``, with names instead of numbers for the parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manager.errors import RegistryError
from manager.state.parameter_order import parameter_names, without_wrappers
from manager.state.registry import StateEntry, StateRegistry, listed

if TYPE_CHECKING:
    from ft_transport import DCPCheckpoint

logger = logging.getLogger(__name__)


def load_dcp(
    checkpoint: DCPCheckpoint, registry: StateRegistry, before_change: Callable[[], None]
) -> dict[str, object]:
    """Read the replicated state from a checkpoint. Tensors that this replica has are overwritten in place.

    Args:
        checkpoint: A checkpoint of another program.
        registry: This replica's state functions.
        before_change: Called after all checks, before the first tensor is overwritten.

    Returns:
        The argument for each load function, by key.

    Raises:
        RegistryError: The checkpoint lacks names, or has tensors of other shapes or dtypes. Nothing was overwritten.
        TransportError: The checkpoint is unreadable.
    """
    request = _Request(checkpoint)
    finishing = {entry.key: _plan(entry, registry, request) for entry in registry.entries("replicated")}
    request.refuse_misfits()
    values = checkpoint.load({}, request.values)
    loaded = {key: finish(values) for key, finish in finishing.items()}
    for entry in registry.entries("replicated"):
        _complete_scheduler(entry, registry, loaded)
    before_change()
    checkpoint.load(request.tensors, ())
    left = (checkpoint.tensors.keys() | checkpoint.values) - request.tensors.keys() - request.values
    # Settings of a parameter group are stored for each of its parameters, and read only for the first one.
    unused = sorted(name for name in left if ".param_groups." not in name)
    if unused:
        logger.warning("%s: %s are not loaded: no registered state has these names", checkpoint.path, listed(unused))
    return loaded


class _Request:
    """Collects the tensors and values to read from a checkpoint, and the reasons why the checkpoint does not fit."""

    def __init__(self, checkpoint: DCPCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: set[str] = set()
        self._misfits: list[str] = []
        self._keys: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors or name in self.checkpoint.values

    def add(self, key: str, own_name: str, name: str, own: object) -> None:
        """Request a leaf of the state under ``key``.

        Args:
            key: The key of the registered state.
            own_name: The name of the leaf here.
            name: The name of the leaf in the checkpoint.
            own: The present value of the leaf. A tensor is overwritten.
        """
        stored = self.checkpoint.tensors.get(name)
        if not self.has(name):
            self.refuse(key, f"{own_name} is missing")
        elif isinstance(own, torch.Tensor) != (stored is not None):
            self.refuse(key, f"{own_name} is a tensor only {'in the checkpoint' if stored is not None else 'here'}")
        elif not isinstance(own, torch.Tensor):
            self.values.add(name)
        elif stored != (own.dtype, own.shape):
            assert stored is not None, "only a tensor has no value"
            self.refuse(
                key,
                f"{own_name} is {own.dtype}{list(own.shape)} here and {stored[0]}{list(stored[1])} in the checkpoint",
            )
        else:
            self.tensors[name] = own.detach()

    def copy_of(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Request a tensor that this replica lacks, and return a new tensor for it.

        The new tensor has the sharding of ``like`` if the shapes are equal.
        """
        dtype, shape = self.checkpoint.tensors[name]
        if like is not None and like.shape == shape:
            self.tensors[name] = torch.empty_like(like.detach(), dtype=dtype)
        else:
            self.tensors[name] = torch.empty(shape, dtype=dtype)
        return self.tensors[name]

    def below(self, prefix: str) -> list[str]:
        """Return all names in the checkpoint that begin with ``prefix``, without the prefix."""
        names = (*self.checkpoint.tensors, *self.checkpoint.values)
        return [name[len(prefix) :] for name in names if name.startswith(prefix)]

    def refuse(self, key: str, misfit: str) -> None:
        self._keys.append(key)
        self._misfits.append(misfit)

    def refuse_misfits(self) -> None:
        if self._misfits:
            names = sorted(self.checkpoint.tensors.keys() | self.checkpoint.values)
            raise RegistryError(
                f"expected the registered states in the checkpoint of another program, {self.checkpoint.path}; "
                f"{listed(self._misfits)}; the names in the checkpoint are {listed(names)}; nothing was loaded. "
                "Register each state under its key in the checkpoint, or move that directory away to train without it",
                keys=tuple(dict.fromkeys(self._keys)),
            )


_Finish = Callable[[Mapping[str, object]], Any]
"""Returns the argument of a load function from the loaded values. The tensors in it are read afterwards."""


def _plan(entry: StateEntry, registry: StateRegistry, request: _Request) -> _Finish:
    own = registry.call(entry)
    if isinstance(entry.holder, Optimizer) and isinstance(own, Mapping):
        return _plan_optimizer(entry, entry.holder, own, registry, request)
    flat, paths = flatten_state_dict({entry.key: own})
    spelled = min(
        ([_spelled(name, entry.key, spelling) for name in flat] for spelling in range(4)),
        key=lambda names: sum(not request.has(name) for name in names),
    )
    of_titan = isinstance(entry.holder, LRScheduler) and f"{entry.key}.last_epoch" in request.checkpoint.values
    for (own_name, value), name in zip(flat.items(), spelled, strict=True):
        if request.has(name) or not of_titan:
            request.add(entry.key, own_name, name, value)

    def finish(values: Mapping[str, object]) -> Any:
        state = {entry.key: _copied(own)}
        for own_name, name in zip(flat, spelled, strict=True):
            if name in values:
                set_element(state, paths[own_name], values[name])
        return state[entry.key]

    return finish


def _spelled(name: str, key: str, spelling: int) -> str:
    """Return ``name`` unchanged, without its key, without module wrappers, or without both, for ``spelling`` 0 to 3."""
    plain = name.removeprefix(f"{key}.") if spelling % 2 else name
    return without_wrappers(plain) if spelling > 1 else plain


def _complete_scheduler(entry: StateEntry, registry: StateRegistry, loaded: dict[str, object]) -> None:
    """Add entries to a scheduler's loaded state that torchtitan does not store: it stores only ``last_epoch``."""
    state, holder = loaded[entry.key], entry.holder
    if isinstance(holder, LRScheduler) and isinstance(state, dict) and "last_epoch" in state:
        optimizer = next((each for each in registry.entries("replicated") if each.holder is holder.optimizer), None)
        part: Any = loaded.get(optimizer.key) if optimizer is not None else None
        state["_step_count"] = state["last_epoch"] + 1
        if isinstance(part, Mapping):
            state["_last_lr"] = [group["lr"] for group in part["param_groups"]]


# ------------------------------------------------------------------------------------------------------- optimizers


def _plan_optimizer(
    entry: StateEntry, holder: Optimizer, own: Mapping[str, Any], registry: StateRegistry, request: _Request
) -> _Finish:
    key = entry.key
    parameters = [parameter for group in holder.param_groups for parameter in group["params"]]
    names = [_names(number, full, registry) for number, full in enumerate(_full_names(key, registry, len(parameters)))]
    owners = {name: number for number, each in enumerate(names) for name in each}
    state: dict[int, dict[str, torch.Tensor | str]] = {}
    below = request.below(f"{key}.state.")
    for name in below:
        parameter_name, _, slot = name.rpartition(".")
        # Find the parameter. If the rest of the name has several parts, the state is nested.
        while parameter_name and parameter_name not in owners:
            parameter_name, _, part = parameter_name.rpartition(".")
            slot = f"{part}.{slot}"
        number = owners.get(parameter_name)
        if number is not None and "." in slot:
            request.refuse(key, f"{key}.state.{name} is part of a nested state, which cannot be loaded")
        elif number is not None:
            slots = state.setdefault(number, {})
            stored = f"{key}.state.{name}"
            if stored in request.checkpoint.tensors:
                slots[slot] = request.copy_of(stored, parameters[number])
            else:
                slots[slot] = stored
                request.values.add(stored)
    lacking = [
        names[number][-1] for number, each in enumerate(parameters) if number not in state and each.requires_grad
    ]
    if below and lacking:
        request.refuse(key, f"{key}.state has no entry for {listed(lacking)}")
    groups = [_plan_group(request, key, number, group, names) for number, group in enumerate(own["param_groups"])]

    def finish(values: Mapping[str, object]) -> dict[str, object]:
        return {
            **own,
            "state": {
                number: {slot: values[each] if isinstance(each, str) else each for slot, each in slots.items()}
                for number, slots in state.items()
            },
            "param_groups": [plan(values) for plan in groups],
        }

    return finish


def _full_names(key: str, registry: StateRegistry, num_parameters: int) -> list[str]:
    names = [name for group in parameter_names(registry).get(key, []) for name in group]
    return names or [""] * num_parameters


def _names(number: int, full_name: str, registry: StateRegistry) -> list[str]:
    """Return the possible names of a parameter in a checkpoint: its number, and its name in each registered module."""
    names = [
        full_name[len(entry.key) + 1 :]
        for entry in registry.entries("replicated")
        if full_name.startswith(f"{entry.key}.")
    ]
    return [str(number), *names]


def _plan_group(
    request: _Request, key: str, number: int, own: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> _Finish:
    """Request the settings of a parameter group, and return a function that makes the group from them.

    DCP stores these settings under the number of the group, or under the name of each parameter in the group.
    """
    own_names = [names[each] for each in own["params"]]
    stems = [f"{key}.param_groups.{each}." for each in (str(number), *(own_names[0] if own_names else ()))]
    found = [(stem, [name for name in own if name != "param_names" and request.has(stem + name)]) for stem in stems]
    stem, below = next((each for each in found if each[1]), (stems[0], []))
    if not below:
        request.refuse(key, f"{stem}* is missing")
    tensors = {name: request.copy_of(stem + name) for name in below if stem + name in request.checkpoint.tensors}
    request.values.update(stem + name for name in below if name not in tensors)

    def finish(values: Mapping[str, object]) -> dict[str, object]:
        group = {name: tensors[name] if name in tensors else values[stem + name] for name in below}
        if "params" in group:
            _check_group(key, number, group["params"], own_names)
        return {**own, **group, "params": own["params"]}

    return finish


def _check_group(key: str, number: int, stored: Any, own: Sequence[Sequence[str]]) -> None:
    stored = stored if isinstance(stored, (list, tuple)) else ()
    is_same = len(stored) == len(own)
    if is_same and all(isinstance(each, str) for each in stored):
        is_same = all(any(name in stored for name in each) for each in own)
    if not is_same:
        raise RegistryError(
            f"expected an optimizer with the same parameter groups under {key!r}; group {number} has {len(own)} "
            f"parameters here and {len(stored)} in the checkpoint: {listed([*map(str, stored)])}; nothing was loaded",
            keys=(key,),
        )


def _copied(value: Any) -> Any:
    """Return ``value`` with copies of its dicts and lists, so that loaded values can be set in the copies."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if type(value) is list else value
