"""Puts the parameters of a receiver's optimizers into the sender's order, because states refer to them by position.

If the parameters of each group have the same names on both sides, the receiver reorders its groups, so that each state
reaches the right parameter. If the names differ, the state is refused with an error that lists them. The order of the
groups themselves never changes, because a training loop refers to groups by number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, product
from typing import Any, Final, TypeAlias

import torch
from torch.optim import Optimizer

from ft_transport.state.matching import Incoming
from manager.errors import RegistryError
from manager.state.optimizer_states import trained_by
from manager.state.registry import StateRegistry, listed

logger = logging.getLogger(__name__)

USER_KEY: Final = "user"
MANAGER_KEY: Final = "manager"
NAMES_KEY: Final = "parameter_names"
"""Key, in the manager's part of a state, of the names of optimizers' parameters (`parameter_names`)."""
_FOUND: Final = " (found)"
"""Suffix of a key whose names come from unregistered modules. Such names count only if both sides have the same."""
_PARAM_NAMES: Final = "param_names"
"""torch's key for the names in a parameter group, if the optimizer was made from ``named_parameters()``."""
_WRAPPERS: Final = re.compile(r"\b(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\.")
"""Parts that activation checkpointing, FSDP and ``torch.compile`` add to parameters' names, but not in state dicts."""
_MAX_DEPTH: Final = 4

Groups: TypeAlias = Sequence[Sequence[str]]
"""The names of an optimizer's parameters, by group. A parameter without a name has an empty str."""


class OrderTakenOverError(RegistryError):
    """The receiver has reordered its parameters, so it must plan the transfer again.

    The package raises and catches this error, before the first byte arrives.
    """


TAKEN_OVER: Final = "the parameters of optimizers have been arranged in the order of the received state"
"""Start of the message of an `OrderTakenOverError`, by which other ranks recognize it: they exchange errors as text."""


def parameter_names(registry: StateRegistry) -> dict[str, list[list[str]]]:
    """Return the names that the parameters of each registered optimizer have in registered modules.

    Returns:
        The names, by key of the optimizer, group and position; an empty str for a parameter that no registered module
        has. Optimizers of which no parameter has a name are left out.
    """
    return _names_of(registry.holders(torch.nn.Module).items(), registry.holders(Optimizer))


def _names_of(
    modules: Iterable[tuple[str, torch.nn.Module]], optimizers: Mapping[str, Optimizer]
) -> dict[str, list[list[str]]]:
    """Return the names of these optimizers' parameters in these modules, as `parameter_names` does."""
    names: dict[int, str] = {}
    for key, module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full_name = f"{key}.{without_wrappers(name)}"
            # A shared parameter gets its alphabetically first name: replicas may differ in the order of submodules.
            names[id(parameter)] = min(names.get(id(parameter), full_name), full_name)
    named = {
        key: [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
        for key, optimizer in optimizers.items()
    }
    return {key: groups for key, groups in named.items() if any(map(any, groups))}


def without_wrappers(name: str) -> str:
    """Return a parameter's name as state dicts contain it, without the parts that wrappers have added."""
    return _WRAPPERS.sub("", name)


def own_part(counters: Mapping[str, object], registry: StateRegistry) -> dict[str, object]:
    """Return the manager's own part of a replica's state: the counters, and the names of optimizers' parameters."""
    named = parameter_names(registry)
    _, found = _found_names(registry, named)
    names = {**named, **{f"{key}{_FOUND}": groups for key, groups in found.items()}}
    return {**counters, NAMES_KEY: names} if names else dict(counters)


def names_in(part: Mapping[str, Any]) -> dict[str, Groups]:
    """Return the names of parameters in the manager's part of a received state, without malformed entries."""
    names = part.get(NAMES_KEY)
    if not isinstance(names, Mapping):
        return {}
    return {
        key: [[name if isinstance(name, str) else "" for name in group] for group in groups]
        for key, groups in names.items()
        if isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    }


def incoming_names(incoming: Incoming, registry: StateRegistry) -> dict[str, Groups]:
    """Return the names of parameters in an incoming state: the sender's, or else the ``param_names`` of its groups."""
    path = (MANAGER_KEY, NAMES_KEY)
    names: dict[str, Groups] = {
        key: [incoming.texts(*path, key, group) for group in range(incoming.num_items(*path, key) or 0)]
        for key in incoming.keys(*path) or ()
    }
    for key in registry.holders(Optimizer):
        groups = (USER_KEY, key, "param_groups")
        numbers = range(incoming.num_items(*groups) or 0)
        names.setdefault(f"{key}{_FOUND}", [incoming.texts(*groups, number, _PARAM_NAMES) for number in numbers])
    return names


def take_over_order(registry: StateRegistry, received: Mapping[str, Groups]) -> tuple[str, ...]:
    """Put the parameters of registered optimizers into the order of a state's sender.

    The caller holds the write lock. After an error, no optimizer has changed.

    The order follows the names in registered modules. Other names are less reliable: they may come from a wrapper, or
    may not show the order (torch replaces ``param_names`` by the sender's). They count only if both sides have them.

    Args:
        registry: The objects registered here.
        received: The sender's names, by key of the optimizer. A parameter with a name on only one side is not compared.

    Returns:
        The keys of the optimizers whose parameters have another order now.

    Raises:
        RegistryError: An optimizer cannot take over the sender's order.
    """
    named, registered = parameter_names(registry), registry.holders(Optimizer)
    loaded, found = _found_names(registry, named)
    changed: list[str] = []
    arranged: list[tuple[dict[str, Any], list[int]]] = []
    for key, optimizer in {**registered, **loaded}.items():
        mine: Groups = named.get(key, ())
        theirs = received.get(key, ())
        if not (mine and theirs):
            param_names = [tuple(group.get(_PARAM_NAMES, ())) for group in optimizer.param_groups]
            own = (mine, found.get(key, ()), param_names)
            mine, theirs = _same_names(own, (theirs, received.get(f"{key}{_FOUND}", ())))
        at = _first_difference(mine, theirs)
        if at is None:
            continue
        hindrance = _hindrance(optimizer, mine, theirs)
        if hindrance and key not in registered:
            logger.warning(
                "the parameters of the optimizer that %r loads are not in the order of the received state; unless the "
                "load function maps states by name, parameters may get the states of other parameters: %s",
                key,
                hindrance,
            )
            continue
        if hindrance:
            group, position = at
            ours, others = mine[group][position:], theirs[group][position:]
            raise RegistryError(
                f"expected the parameters of the optimizer {key!r} in the sender's order; from position {position} of "
                f"group {group} on, they are {listed(ours)} here and {listed(others)} at the sender, and this replica "
                f"cannot take over that order: {hindrance}; pass the parameters to the optimizers of all replicas in "
                "one order, for example sorted by name; nothing was received",
                keys=(key,),
            )
        changed.append(key)
        for params, ours, others in zip(optimizer.param_groups, mine, theirs, strict=True):
            positions = {name: position for position, name in enumerate(ours)}
            arranged.append((params, [positions[name] for name in others]))
    for group_of_parameters, order in arranged:
        for each in (group_of_parameters["params"], group_of_parameters.get(_PARAM_NAMES)):
            # In place, because torch, schedulers and the training loop may refer to the list.
            if each is not None:
                each[:] = [each[position] for position in order]
    if changed:
        registry.num_changes += 1
        logger.warning(
            "the parameters of %s were in another order than in the received state; they have been put into the order "
            "of that state, by name",
            ", ".join(map(repr, changed)),
        )
    return tuple(changed)


def orders_of(registry: StateRegistry) -> Iterator[tuple[str, Groups, bool]]:
    """Yield, for each registered optimizer: its key, the names of its parameters, and whether it can reorder them."""
    names = parameter_names(registry)
    for key, optimizer in registry.holders(Optimizer).items():
        groups = names.get(key, ())
        yield key, groups, not _hindrance(optimizer, groups, groups)


def _found_names(registry: StateRegistry, named: Collection[str]) -> tuple[dict[str, Optimizer], dict[str, Groups]]:
    """Find the optimizers and modules to which a user's own load functions refer, and names of parameters in them.

    Another replica may find other names, if its functions refer to other modules.

    Args:
        registry: The registered states.
        named: Keys of the optimizers whose parameters have names in registered modules.

    Returns:
        Two dicts by key: the optimizer of each function that refers to exactly one optimizer; and the names of
        parameters for these optimizers and for registered optimizers that are not in ``named``.
    """
    modules: list[tuple[str, torch.nn.Module]] = []
    loaded: dict[str, Optimizer] = {}
    optimizers = registry.holders(Optimizer)
    known = {id(each) for each in optimizers.values()}
    for entry in registry.entries("replicated"):
        if entry.key in optimizers:
            continue
        found = {id(each): each for each in trained_by(entry.load_state_dict)}
        modules += [(entry.key, each) for each in found.values() if isinstance(each, torch.nn.Module)]
        others = [each for each in found.values() if isinstance(each, Optimizer) and id(each) not in known]
        known.update(map(id, others))
        if len(others) == 1:
            loaded[entry.key] = others[0]
    nameless = {key: each for key, each in {**optimizers, **loaded}.items() if key not in named}
    names: dict[str, Groups] = {**_names_of(modules, nameless)} if nameless else {}
    return loaded, names


def _same_names(mine: Sequence[Groups], theirs: Sequence[Groups]) -> tuple[Groups, Groups]:
    """Return the first pair of own and received names that differ at most in order; two empty tuples without a pair."""
    for own, others in product(mine, theirs):
        names = sorted(chain.from_iterable(own))
        if names and names == sorted(chain.from_iterable(others)):
            return own, others
    return (), ()


def _first_difference(mine: Groups, theirs: Groups) -> tuple[int, int] | None:
    """Return group and position of the first parameter whose names differ; ``None`` if all are equal."""
    for group, names in enumerate(zip(mine, theirs, strict=False)):
        for position, (ours, other) in enumerate(zip(*names, strict=False)):
            if ours != other and ours and other:
                return group, position
    return None


def _hindrance(optimizer: Optimizer, mine: Groups, theirs: Groups) -> str:
    """Return why an optimizer's parameters cannot be reordered; an empty str if they can be."""
    kind, name = type(optimizer), type(optimizer).__name__
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        return f"{name} does not save and load its state as torch's optimizers do"
    parts = [value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")]
    if not all(isinstance(key, torch.Tensor) for key in optimizer.state) or not _is_plain(parts, _MAX_DEPTH):
        return f"{name} may store an order of parameters in its other attributes"
    if len(mine) != len(theirs):
        return f"the optimizer has {len(mine)} groups here and {len(theirs)} at the sender"
    for number, (ours, others) in enumerate(zip(mine, theirs, strict=True)):
        alone, missing = [sorted(set(one) - set(two)) for one, two in ((ours, others), (others, ours))]
        if alone or missing:
            return f"group {number} has {listed(alone)} only here and {listed(missing)} only at the sender"
        if not len(set(ours)) == len(ours) == len(others) or "" in ours:
            return f"group {number} has parameters without a name, or two parameters with the same name"
    return ""


def _is_plain(value: object, depth: int) -> bool:
    """Return whether a value in an optimizer's attributes cannot refer to parameters. Hooks are not examined."""
    match value:
        case None | bool() | int() | float() | complex() | str() | torch.dtype() | torch.device():
            return True
        case Mapping():
            return depth > 0 and all(_is_plain(each, depth - 1) for each in chain(value.keys(), value.values()))
        case list() | tuple() | Set():
            return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
        case torch.nn.Module() | Optimizer():
            return False
        case _:
            return callable(value)
