"""The order of an optimizer's parameters: states travel by position, so a receiver takes over the sender's order.

A received optimizer state refers to parameters by position. If the parameters of each group have the same names on both
sides, the receiver arranges its groups in the sender's order, so that each state reaches the right parameter. Other
states are refused, with names. The order of the groups stays: a training loop addresses groups by number.
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
"""Key of the result of `parameter_names` in the manager's part of a state."""
_FOUND: Final = " (found)"
"""Suffix of keys whose names do not come from registered modules; such names count only if both sides have them."""
_PARAM_NAMES: Final = "param_names"
"""Torch's key for names in the groups of an optimizer made from ``named_parameters()``."""
_WRAPPERS: Final = re.compile(r"\b(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\.")
"""Activation checkpointing, FSDP and ``torch.compile`` insert these into parameter names, but not into state dicts."""
_MAX_DEPTH: Final = 4

Groups: TypeAlias = Sequence[Sequence[str]]
"""The names of an optimizer's parameters by group; an empty str for a parameter without a name."""


class OrderTakenOverError(RegistryError):
    """The receiver has reordered its own parameters, so its plan for receiving is void.

    Raised and caught inside the package, before the first byte arrives.
    """


TAKEN_OVER: Final = "the parameters of optimizers have been arranged in the order of the received state"
"""Start of the message of an `OrderTakenOverError`. Ranks exchange errors as text."""


def parameter_names(registry: StateRegistry) -> dict[str, list[list[str]]]:
    """Return the names that registered modules give to the parameters of each registered optimizer, by group.

    Returns:
        Names by key, in the optimizer's order; an empty str for a parameter that no registered module has. Optimizers
        without any name are left out.
    """
    return _names_of(registry.holders(torch.nn.Module).items(), registry.holders(Optimizer))


def _names_of(
    modules: Iterable[tuple[str, torch.nn.Module]], optimizers: Mapping[str, Optimizer]
) -> dict[str, list[list[str]]]:
    """See `parameter_names`; each module comes with the key that prefixes its names."""
    names: dict[int, str] = {}
    for key, module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full_name = f"{key}.{without_wrappers(name)}"
            # A shared parameter gets the first of its names in the alphabet: the order of submodules may differ.
            names[id(parameter)] = min(names.get(id(parameter), full_name), full_name)
    named = {
        key: [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
        for key, optimizer in optimizers.items()
    }
    return {key: groups for key, groups in named.items() if any(map(any, groups))}


def without_wrappers(name: str) -> str:
    """Return a parameter's name as state dicts have it."""
    return _WRAPPERS.sub("", name)


def own_part(counters: Mapping[str, object], registry: StateRegistry) -> dict[str, object]:
    """Return the manager's own part of a replica's state: counters, and names of optimizers' parameters."""
    named = parameter_names(registry)
    _, found = _found_names(registry, named)
    names = {**named, **{f"{key}{_FOUND}": groups for key, groups in found.items()}}
    return {**counters, NAMES_KEY: names} if names else dict(counters)


def names_in(part: Mapping[str, Any]) -> dict[str, Groups]:
    """Return the names of parameters in a received manager's part; malformed entries are left out."""
    names = part.get(NAMES_KEY)
    if not isinstance(names, Mapping):
        return {}
    return {
        key: [[name if isinstance(name, str) else "" for name in group] for group in groups]
        for key, groups in names.items()
        if isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    }


def incoming_names(incoming: Incoming, registry: StateRegistry) -> dict[str, Groups]:
    """Return the names of parameters in an incoming state, or the ``param_names`` of its groups."""
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
    """Arrange the parameters of registered optimizers in the order of a state's sender.

    The caller holds the write lock. Either all optimizers are arranged or none.

    Names from registered modules decide. Other names may come from a wrapper, or say nothing about the order (torch
    replaces ``param_names`` by the sender's), so they count only if both sides have the same ones.

    Args:
        registry: The objects registered here.
        received: The sender's names, by key. Parameters with a name on only one side are not compared.

    Returns:
        The keys of the rearranged optimizers.

    Raises:
        RegistryError: An order differs and cannot be taken over. Nothing has changed.
    """
    named, registered = parameter_names(registry), registry.holders(Optimizer)
    loaded, found = _found_names(registry, named)
    changed: list[str] = []
    arranged: list[tuple[dict[str, Any], list[int]]] = []
    for key, optimizer in {**registered, **loaded}.items():
        mine: Groups = named.get(key, ())
        theirs = received.get(key, ())
        if not (mine and theirs):
            own = (mine, found.get(key, ()), _param_names(optimizer))
            mine, theirs = _same_names(own, (theirs, received.get(f"{key}{_FOUND}", ())))
        at = _first_difference(mine, theirs)
        if at is None:
            continue
        hindrance = _hindrance(optimizer, mine, theirs)
        if hindrance and key not in registered:
            logger.warning(
                "the parameters of the optimizer that %r loads stand in another order than in the state that is "
                "received, and may get the states of others unless the function maps them by name: %s",
                key,
                hindrance,
            )
            continue
        if hindrance:
            group, position = at
            ours, others = mine[group][position:], theirs[group][position:]
            raise RegistryError(
                f"expected the parameters of the optimizer {key!r} in the same order; from position {position} of "
                f"group {group} on they are {listed(ours)} here and {listed(others)} there, and this replica "
                f"cannot take over that order: {hindrance}; give the optimizers of all replicas their parameters in "
                "one order, for example sorted by name; nothing was received",
                keys=(key,),
            )
        changed.append(key)
        for params, ours, others in zip(optimizer.param_groups, mine, theirs, strict=True):
            positions = {name: position for position, name in enumerate(ours)}
            arranged.append((params, [positions[name] for name in others]))
    for group_of_parameters, order in arranged:
        for each in (group_of_parameters["params"], group_of_parameters.get(_PARAM_NAMES)):
            # In place: torch, schedulers and the training loop may refer to the list.
            if each is not None:
                each[:] = [each[position] for position in order]
    if changed:
        registry.num_changes += 1
        logger.warning(
            "the parameters of %s stood in another order than in the state that is received; they have been arranged "
            "in its order, by name",
            ", ".join(map(repr, changed)),
        )
    return tuple(changed)


def orders_of(registry: StateRegistry) -> Iterator[tuple[str, Groups, bool]]:
    """Yield each registered optimizer's key, the names of its parameters, and whether their order may change."""
    names = parameter_names(registry)
    for key, optimizer in registry.holders(Optimizer).items():
        groups = names.get(key, ())
        yield key, groups, not _hindrance(optimizer, groups, groups)


def _param_names(optimizer: Optimizer) -> Groups:
    return [tuple(group.get(_PARAM_NAMES, ())) for group in optimizer.param_groups]


def _found_names(registry: StateRegistry, named: Collection[str]) -> tuple[dict[str, Optimizer], dict[str, Groups]]:
    """Find optimizers that a user's own load functions refer to, and names from modules that these functions refer to.

    The function of another replica may refer to other modules.

    Args:
        registry: The registered states.
        named: Keys of optimizers that have names already.

    Returns:
        Optimizers by key, of functions that refer to exactly one; names for them and for registered optimizers without
        names.
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
    """Return the first pair of groups with the same names in any order; empty groups without such a pair."""
    for own, others in product(mine, theirs):
        names = sorted(chain.from_iterable(own))
        if names and names == sorted(chain.from_iterable(others)):
            return own, others
    return (), ()


def _first_difference(mine: Groups, theirs: Groups) -> tuple[int, int] | None:
    for group, names in enumerate(zip(mine, theirs, strict=False)):
        for position, (ours, other) in enumerate(zip(*names, strict=False)):
            if ours != other and ours and other:
                return group, position
    return None


def _hindrance(optimizer: Optimizer, mine: Groups, theirs: Groups) -> str:
    """Return why an optimizer's parameters cannot be reordered; empty if they can."""
    kind, name = type(optimizer), type(optimizer).__name__
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        return f"{name} does not save and load its state as torch's optimizers do"
    parts = [value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")]
    if not all(isinstance(key, torch.Tensor) for key in optimizer.state) or not _is_plain(parts, _MAX_DEPTH):
        return f"{name} may hold an order of parameters of its own"
    if len(mine) != len(theirs):
        return f"there are {len(mine)} groups here and {len(theirs)} there"
    for number, (ours, others) in enumerate(zip(mine, theirs, strict=True)):
        alone, missing = [sorted(set(one) - set(two)) for one, two in ((ours, others), (others, ours))]
        if alone or missing:
            return f"group {number} has {listed(alone)} here alone and {listed(missing)} there alone"
        if not len(set(ours)) == len(ours) == len(others) or "" in ours:
            return f"group {number} has parameters without a name, or two of one name"
    return ""


def _is_plain(value: object, depth: int) -> bool:
    """Return whether an optimizer's attribute cannot refer to its parameters. Hooks might, and are not examined."""
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
