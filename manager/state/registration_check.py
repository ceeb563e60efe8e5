"""Checks that all trained state is registered, and that snapshots can hold all registered state.

Otherwise replicas would train with different parameters, or fail hours later when one of them needs the state.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ft_transport import SnapshotError, check_encodable
from manager.errors import RegistryError
from manager.state.guard_marks import local_updates_of
from manager.state.guarded_memory import parameters_of, storage_of, tensors_in
from manager.state.registry import Scope, StateEntry, StateRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

PLAIN: Final = (nn.Module, Optimizer, LRScheduler, GradScaler)
"""Classes whose state dicts have a known form."""
_MAX_SHOWN = 5


class EncodingCheck:
    """Finds leaves of the registered states that no snapshot can hold, before the first request for one.

    For the training thread, at a step boundary.

    Args:
        registry: The registered states.
        optimizers: Returns the attached optimizers.
        scopes: The scopes that are served or saved.
    """

    def __init__(
        self, registry: StateRegistry, optimizers: Callable[[], Sequence[Optimizer]], scopes: Sequence[Scope]
    ) -> None:
        self._registry = registry
        self._optimizers = optimizers
        self._scopes = scopes
        self._checked: tuple[int, ...] = ()
        self._num_boundaries = 0

    def check(self) -> None:
        """Check the states in the first two boundaries, after each registration, and when an optimizer's state grows.

        Tensors are checked from the second boundary on: the first step may allocate their memory.

        Raises:
            RegistryError: A leaf has no encoding; the message names its path.
        """
        self._num_boundaries += 1
        optimizers = self._optimizers()
        signature = (
            min(self._num_boundaries, 2),
            self._registry.num_changes,
            # If states appear one by one, a check at each doubling keeps the sum at twice the last check.
            *(number for each in optimizers for number in (id(each), len(each.state).bit_length())),
        )
        if signature == self._checked:
            return
        for entry in (each for scope in self._scopes for each in self._registry.entries(scope)):
            self._check(entry, with_tensors=self._num_boundaries > 1)
        self._checked = signature

    def _check(self, entry: StateEntry, *, with_tensors: bool) -> None:
        try:
            state = self._registry.call(entry)
        except RegistryError as error:
            logger.debug("the state of %r cannot be looked at: %s", entry.key, error)
            return
        try:
            check_encodable(state, with_tensors=with_tensors)
        except SnapshotError as error:
            path = error.path if error.path not in (None, "(root)") else ""
            raise RegistryError(
                f"expected a state that can be served to other replicas and saved; {entry.key}{'.' if path else ''}"
                f"{path}: {error.message}",
                keys=(entry.key,),
            ) from error


def check_registered(registry: StateRegistry, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers, parameters and schedulers that no registered state contains.

    This covers attached and registered optimizers, and other optimizers with parameters of a registered module that no
    attached or registered one has. It covers schedulers that have marked one of these optimizers. The search through
    all objects of the process (0.1 s for 300,000) runs only if one of them seems to be missing.

    A user's own state functions may return copies, or an optimizer's state in another form. If there are any, a missing
    part causes a warning instead.

    Args:
        registry: The registered states.
        optimizers: The attached optimizers.

    Raises:
        RegistryError: Nothing is registered, or a trained part is not; the message names it.
    """
    entries = registry.entries("replicated")
    if not entries:
        raise RegistryError(
            "expected a registered state to keep equal on all replicas, got none; call "
            "manager.register('model', model) and manager.register('optimizer', optimizer) before start_quorum"
        )
    registered = [entry.holder for entry in entries if isinstance(entry.holder, Optimizer)]
    try:
        state = {**registry.state_dict("local"), **registry.state_dict("replicated")}
    except RegistryError as error:
        logger.debug("what is registered cannot be compared with what is trained: %s", error)
        return
    known = {**dict.fromkeys(registered, "registered"), **dict.fromkeys(optimizers, "attached")}
    refuse_unregistered(
        registry,
        [
            *_missing_optimizers(registry, state, optimizers),
            *_missing_parameters(state, known),
            *_forgotten_optimizers(registry, state, known),
            *_forgotten_schedulers(registry, state, known),
        ],
    )


def check_averaged(registry: StateRegistry, optimizers: Sequence[Optimizer], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse gradients of parameters that are neither registered nor an attached optimizer's.

    Other tensors are allowed: only the present gradients of existing parameters count. The search for parameters runs
    only if a tensor is not the gradient of a known parameter.

    Args:
        registry: The registered states.
        optimizers: The attached optimizers.
        tensors: The reduced tensors.

    Raises:
        RegistryError: A gradient is of none; the message names the shapes of the parameters.
    """
    known = {id(each.grad) for each in [*registry.parameters(), *parameters_of(optimizers)]}
    unknown = {id(each) for each in tensors} - known
    if not unknown:
        return
    # Leaves only: other tensors warn when their gradient is read.
    leaves = (each for each in _living(torch.Tensor) if each.requires_grad and each.is_leaf)
    parameters = {id(each.grad): each for each in leaves if id(each.grad) in unknown}
    found = [parameters[id(each)] for each in tensors if id(each) in parameters]
    if found:
        held = {storage_of(tensor) for tensor in tensors_in(registry.state_dict("replicated"))}
        missing = [f"a parameter {list(each.shape)}" for each in found if storage_of(each) not in held]
        refuse_unregistered(registry, [f"{each}, whose gradient is averaged" for each in missing])


def refuse_unregistered(registry: StateRegistry, missing: Sequence[str]) -> None:
    """Raise an error for missing parts, or warn if a registered function may return them.

    Args:
        registry: The registered states.
        missing: Descriptions of trained parts that are not registered.

    Raises:
        RegistryError: A part is missing, and no registered object can contain it.
    """
    if not missing:
        return
    entries = registry.entries("replicated")
    shown = "; ".join(missing[:_MAX_SHOWN])
    if len(missing) > _MAX_SHOWN:
        shown += f"; {len(missing) - _MAX_SHOWN} more"
    told = (
        f"expected everything that takes part in training to be registered, and this is not: {shown}; without "
        "manager.register(key, object) replicas train on with different values"
    )
    if all(isinstance(entry.holder, PLAIN) for entry in entries):
        raise RegistryError(told, keys=tuple(entry.key for entry in entries))
    logger.warning("%s (a registered function may return it as a copy)", told)


def _missing_optimizers(
    registry: StateRegistry, state: Mapping[str, object], optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    registered = {id(entry.holder) for entry in registry.entries()}
    attached = {id(optimizer) for optimizer in optimizers}
    # The state of a user's own function or of a wrapper may contain an optimizer's state.
    others = [state[entry.key] for entry in registry.entries() if id(entry.holder) not in attached]
    nested = [len(groups) for value in others for groups in _parameter_groups_in(value)]
    for index, optimizer in enumerate(dict.fromkeys(optimizers)):
        if id(optimizer) not in registered and len(optimizer.param_groups) not in nested:
            yield f"the attached optimizer {index} ({type(optimizer).__name__})"


def _parameter_groups_in(value: object) -> Iterator[Sequence[object]]:
    if isinstance(value, Mapping):
        groups = value.get("param_groups")
        if isinstance(groups, list):
            yield groups
        else:
            yield from _parameter_groups_in(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _parameter_groups_in(item)


def _missing_parameters(state: Mapping[str, object], optimizers: Mapping[Optimizer, str]) -> Iterator[str]:
    held = {storage_of(tensor) for tensor in tensors_in(state)}
    for optimizer, role in optimizers.items():
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.numel() and storage_of(parameter) not in held:
                    name = f"parameter {index} of group {group_index} {list(parameter.shape)}"
                    yield f"{name} of the {role} {type(optimizer).__name__}"


def _forgotten_optimizers(
    registry: StateRegistry, state: Mapping[str, object], known: Mapping[Optimizer, str]
) -> Iterator[str]:
    """Yield optimizers of registered modules' parameters that are neither attached nor registered."""
    local = [entry.holder for entry in registry.entries("local") if isinstance(entry.holder, Optimizer)]
    stepped = {id(parameter) for parameter in parameters_of([*known, *local, *_wrapped(registry, Optimizer)])}
    unstepped = {
        id(parameter): entry.key
        for entry in registry.entries("replicated")
        if isinstance(module := entry.holder, nn.Module)
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in stepped
    }
    if not unstepped or any(_parameter_groups_in(_of_unknown(registry, state))):
        return
    for optimizer in _living(Optimizer):
        groups = getattr(optimizer, "param_groups", ())
        keys = [unstepped[id(each)] for group in groups for each in group["params"] if id(each) in unstepped]
        # Between two synchronisations of LocalSGD or DiLoCo each replica has its own momentum.
        if keys and not any(local_updates_of(optimizer)):
            what = f"an optimizer of {len(keys)} parameters of {keys[0]!r} (drop it if it is not used)"
            yield f"{type(optimizer).__name__}, {what}"


def _forgotten_schedulers(
    registry: StateRegistry, state: Mapping[str, object], known: Mapping[Optimizer, str]
) -> Iterator[str]:
    """Yield unregistered schedulers of these optimizers. Schedulers mark ``step`` and add ``initial_lr`` to groups."""
    registered = [entry.holder for entry in registry.entries() if isinstance(entry.holder, LRScheduler)]
    registered += _wrapped(registry, LRScheduler)
    marked = [
        optimizer
        for optimizer in known
        if (hasattr(optimizer.step, "_wrapped_by_lr_sched") or any("initial_lr" in g for g in optimizer.param_groups))
        and not any(_schedules(scheduler, optimizer) for scheduler in registered)
    ]
    if not marked or _holds_scheduler(_of_unknown(registry, state)):
        return
    # Marks outlive their scheduler, and arrive with a received state.
    living = _living(LRScheduler)
    for optimizer in marked:
        kinds = sorted({type(scheduler).__name__ for scheduler in living if _schedules(scheduler, optimizer)})
        if kinds:
            yield f"{' and '.join(kinds)}, which sets the learning rates of the {known[optimizer]} " + (
                type(optimizer).__name__
            )


def _schedules(scheduler: LRScheduler, optimizer: Optimizer) -> bool:
    scheduled = getattr(scheduler, "optimizer", None)
    # A wrapping optimizer shares the groups of the wrapped one.
    return scheduled is optimizer or getattr(scheduled, "param_groups", None) is optimizer.param_groups


def _of_unknown(registry: StateRegistry, state: Mapping[str, object]) -> list[object]:
    """Return the states of plain functions, and of objects that wrap neither an optimizer nor a scheduler."""
    return [
        state[entry.key]
        for entry in registry.entries()
        if not isinstance(entry.holder, PLAIN) and not any(_parts_of(entry.holder, (Optimizer, LRScheduler)))
    ]


def _wrapped(registry: StateRegistry, kind: type[T]) -> list[T]:
    """Return the optimizers or schedulers inside registered objects of other classes."""
    return [part for entry in registry.entries() for part in _parts_of(entry.holder, (kind,))]


def _parts_of(holder: object, kinds: tuple[type[T], ...]) -> Iterator[T]:
    """Yield an unknown object's attributes of these classes, also from lists and dicts."""
    if holder is None or isinstance(holder, PLAIN):
        return
    for value in getattr(holder, "__dict__", {}).values():
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        yield from (each for each in inner if issubclass(type(each), kinds))


def _holds_scheduler(value: object) -> bool:
    if isinstance(value, Mapping):
        return "last_epoch" in value or any(map(_holds_scheduler, value.values()))
    return isinstance(value, list) and any(map(_holds_scheduler, value))


def _living(kind: type[T]) -> list[T]:
    # Garbage may still wait for the collector on one replica and not on another.
    gc.collect()
    # `isinstance` would read ``__class__``, which runs the code of lazy modules.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
