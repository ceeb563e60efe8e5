"""Checks that all trained state is registered and can be encoded, and that loops average gradients before unscaling.

Without these checks, replicas would train with different parameters, or fail hours later when a newcomer needs a state.

A gradient scaler detects infinities while it unscales gradients, and skips the step if it finds one. If gradients are
averaged first, the scalers of all replicas find the same infinities. If a loop unscales first, an overflow on one
replica puts infinities into all replicas' averages, but only that replica's scaler skips the step; the weights of the
other replicas become NaN.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ft_transport import SnapshotError, check_encodable
from manager.errors import ManagerError, RegistryError
from manager.state.optimizer_guard import local_updates_of
from manager.state.optimizer_states import parameters_of, storage_of, tensors_in
from manager.state.registry import Scope, StateEntry, StateRegistry, listed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SCALER_MODULE: Final = GradScaler.__module__
PLAIN: Final = (nn.Module, Optimizer, LRScheduler, GradScaler)
"""Classes of registered objects whose state dicts have a known form."""


class EncodingCheck:
    """Detects values in registered states that snapshots cannot encode, before the first snapshot is requested.

    Args:
        registry: The registered states.
        scopes: The scopes that are served to other replicas or saved.
    """

    def __init__(self, registry: StateRegistry, scopes: Sequence[Scope]) -> None:
        self._registry = registry
        self._scopes = scopes
        self._checked: tuple[int, ...] = ()
        self._num_boundaries = 0

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Check the states at the first two boundaries, after a registration, and when an optimizer's state has grown.

        Called on the training thread at each step boundary, with the attached optimizers. Tensors are checked from the
        second boundary on, because the first step may allocate their memory.

        Raises:
            RegistryError: A value has no encoding. The message names its path.
        """
        self._num_boundaries += 1
        signature = (
            min(self._num_boundaries, 2),
            self._registry.num_changes,
            # The bit length changes at each doubling, so states that appear one by one cause only a few checks.
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
            logger.debug("the state of %r cannot be checked: %s", entry.key, error)
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
    """Raise an error if an optimizer, parameter or scheduler takes part in training and is in no registered state.

    The check covers attached and registered optimizers and their parameters, other optimizers that train parameters of
    registered modules, and the schedulers of all these optimizers. If one seems to be missing, all objects of the
    process are searched for it, which takes 0.1 s for 300,000 objects.

    A user's own state function may return the missing part as a copy, or in another form. If such a function is
    registered, this only logs a warning.

    Raises:
        RegistryError: Nothing is registered; or a trained part is missing, and the message names it.
    """
    if not registry.entries("replicated"):
        raise RegistryError(
            "expected at least one registered object with replicated state, got none; call "
            "manager.register('model', model) and manager.register('optimizer', optimizer) before start_quorum"
        )
    registered = registry.holders(Optimizer).values()
    try:
        state = {**registry.state_dict("local"), **registry.state_dict("replicated")}
    except RegistryError as error:
        logger.debug("the registered state cannot be compared with the trained objects: %s", error)
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
    """Raise an error if a reduced tensor is the gradient of a parameter that is neither registered nor attached.

    The search for such a parameter runs only if a tensor is not the gradient of a known parameter.

    Raises:
        RegistryError: Such parameters exist; the message has their shapes.
    """
    known = {id(each.grad) for each in [*registry.parameters(), *parameters_of(optimizers)]}
    unknown = {id(each): each.shape for each in tensors if id(each) not in known}
    if not unknown:
        return
    # If another thread runs ``backward``, reading a gradient that it replaces may crash the process. So this reads
    # only the gradients of parameters with these shapes, and none that another replica in this process has registered.
    others = {id(parameter) for other in _living(StateRegistry) for parameter in other.parameters()}
    # Only leaves, because torch warns when the gradient of another tensor is read.
    leaves = (each for each in _living(torch.Tensor) if each.requires_grad and each.is_leaf and id(each) not in others)
    candidates = (each for each in leaves if _has_shape_of(each, unknown.values()))
    parameters = {id(each.grad): each for each in candidates if id(each.grad) in unknown}
    found = [parameters[id(each)] for each in tensors if id(each) in parameters]
    if found:
        held = {storage_of(tensor) for tensor in tensors_in(registry.state_dict("replicated"))}
        missing = [f"a parameter {list(each.shape)}" for each in found if storage_of(each) not in held]
        refuse_unregistered(registry, [f"{each}, whose gradient is averaged" for each in missing])


def refuse_unregistered(registry: StateRegistry, missing: Sequence[str]) -> None:
    """Raise an error for parts that are trained and not registered; only warn if a registered function may return them.

    Raises:
        RegistryError: A part is missing, and no registered object can contain that part.
    """
    if not missing:
        return
    entries = registry.entries("replicated")
    message = (
        f"expected everything that takes part in training to be registered, but this is not: "
        f"{listed(missing, '; ')}; without manager.register(key, object) replicas train on with different values"
    )
    if all(isinstance(entry.holder, PLAIN) for entry in entries):
        raise RegistryError(message, keys=tuple(entry.key for entry in entries))
    logger.warning("%s (ignore this if a registered function returns copies of these)", message)


def _missing_optimizers(
    registry: StateRegistry, state: Mapping[str, object], optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    registered = {id(entry.holder) for entry in registry.entries()}
    attached = {id(optimizer) for optimizer in optimizers}
    # The result of a user's own function, or a wrapper's state, may contain the optimizer's state.
    others = [state[entry.key] for entry in registry.entries() if id(entry.holder) not in attached]
    nested = [len(groups) for groups in _parameter_groups_in(others)]
    for index, optimizer in enumerate(dict.fromkeys(optimizers)):
        if id(optimizer) not in registered and len(optimizer.param_groups) not in nested:
            yield f"the attached optimizer {index} ({type(optimizer).__name__})"


def _mappings_in(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the mappings nested in a state, and the state itself if it is a mapping."""
    yield from (value,) if isinstance(value, Mapping) else ()
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _mappings_in(item)


def _parameter_groups_in(value: object) -> Iterator[Sequence[object]]:
    yield from (groups for each in _mappings_in(value) if isinstance(groups := each.get("param_groups"), list))


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
    """Describe the optimizers that train registered modules' parameters and are neither attached nor registered."""
    local = registry.holders(Optimizer, "local").values()
    stepped = {id(parameter) for parameter in parameters_of([*known, *local, *_wrapped(registry, Optimizer)])}
    unstepped = {
        id(parameter): key
        for key, module in registry.holders(nn.Module).items()
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in stepped
    }
    if not unstepped or any(_parameter_groups_in(_of_unknown(registry, state))):
        return
    for optimizer in _living(Optimizer):
        groups = getattr(optimizer, "param_groups", ())
        keys = [unstepped[id(each)] for group in groups for each in group["params"] if id(each) in unstepped]
        # An inner optimizer of LocalSGD or DiLoCo need not be registered: its state differs between replicas.
        if keys and not any(local_updates_of(optimizer)):
            optimized = f"{len(keys)} parameters of {keys[0]!r} (delete it if it is not used)"
            yield f"{type(optimizer).__name__}, an optimizer of {optimized}"


def _forgotten_schedulers(
    registry: StateRegistry, state: Mapping[str, object], known: Mapping[Optimizer, str]
) -> Iterator[str]:
    """Describe the unregistered schedulers of the optimizers in ``known``.

    A scheduler leaves marks on an optimizer: an attribute of ``step``, and ``initial_lr`` in the groups.
    """
    registered = [*registry.holders(LRScheduler, None).values(), *_wrapped(registry, LRScheduler)]
    marked = [
        optimizer
        for optimizer in known
        if (hasattr(optimizer.step, "_wrapped_by_lr_sched") or any("initial_lr" in g for g in optimizer.param_groups))
        and not any(_schedules(scheduler, optimizer) for scheduler in registered)
    ]
    if not marked or any("last_epoch" in each for each in _mappings_in(_of_unknown(registry, state))):
        return
    # A mark does not prove that a scheduler exists: marks stay after its end, and a received state has them, too.
    living = _living(LRScheduler)
    for optimizer in marked:
        kinds = sorted({type(scheduler).__name__ for scheduler in living if _schedules(scheduler, optimizer)})
        if kinds:
            scheduled = f"the {known[optimizer]} {type(optimizer).__name__}"
            yield f"{' and '.join(kinds)}, which sets the learning rates of {scheduled}"


def _schedules(scheduler: LRScheduler, optimizer: Optimizer) -> bool:
    scheduled = getattr(scheduler, "optimizer", None)
    # An optimizer that wraps another shares the groups of that optimizer.
    return scheduled is optimizer or getattr(scheduled, "param_groups", None) is optimizer.param_groups


def _of_unknown(registry: StateRegistry, state: Mapping[str, object]) -> list[object]:
    """Return the states of functions, and of objects of unknown classes that contain no optimizer or scheduler."""
    return [
        state[entry.key]
        for entry in registry.entries()
        if not isinstance(entry.holder, PLAIN) and not any(_parts_of(entry.holder, (Optimizer, LRScheduler)))
    ]


def _wrapped(registry: StateRegistry, kind: type[T]) -> list[T]:
    """Return the optimizers or schedulers that registered objects of other classes have in attributes."""
    return [part for entry in registry.entries() for part in _parts_of(entry.holder, (kind,))]


def _parts_of(holder: object, kinds: tuple[type[T], ...]) -> Iterator[T]:
    """Yield the objects of ``kinds`` in the attributes of a holder, and in lists, tuples and dicts there."""
    if holder is None or isinstance(holder, PLAIN):
        return
    for value in getattr(holder, "__dict__", {}).values():
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        yield from (each for each in inner if issubclass(type(each), kinds))


def _has_shape_of(tensor: torch.Tensor, shapes: Collection[torch.Size]) -> bool:
    try:
        return tensor.shape in shapes
    except RuntimeError:  # lazy parameters and nested tensors
        return False


def _living(kind: type[T]) -> list[T]:
    # Unused objects might be found on one replica only. The others move to generation 2, whose list is the same twice.
    gc.collect()
    # A reference to another thread's unfinished tuple makes that thread fail (github.com/python/cpython/issues/59313).
    # So the lists exist only inside one call of C code, during which no other thread runs.
    objects, same = (chain.from_iterable(map(gc.get_objects, (2,))) for _ in range(2))
    # Not `isinstance`, which reads ``__class__`` and so runs the code of lazy modules.
    return list(compress(objects, map(issubclass, map(type, same), repeat(kind))))


class Scalers:
    """The gradient scalers of a replica: those that are registered, and those that have stepped its optimizers.

    Only the training thread may use this object.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self._seen: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._known_in_step: list[GradScaler] = []

    def known(self) -> list[GradScaler]:
        """Return the scalers."""
        return [*self._registry.holders(GradScaler).values(), *self._seen]

    def check_stepping(self, optimizer: Optimizer) -> None:
        """If a scaler is calling the optimizer's ``step``, make sure that the scaler is registered. Takes some µs.

        Raises:
            RegistryError: The scaler is not registered: its scale would be wrong on a replica that has healed.
        """
        scaler = _calling_scaler()
        if scaler is None or not scaler.is_enabled() or scaler in self.known():
            return
        self._seen.add(scaler)
        entries = [entry for entry in self._registry.entries("replicated") if not isinstance(entry.holder, PLAIN)]
        if not any("growth_factor" in each for each in _mappings_in(list(map(self._registry.call, entries)))):
            missing = f"{type(scaler).__name__}, which steps {type(optimizer).__name__}: register('scaler', scaler)"
            refuse_unregistered(self._registry, [missing])

    def begin_step(self) -> None:
        """Store the scalers for `refuse_unscaled`, which a step may call for each of a thousand tensors."""
        self._known_in_step = self.known()

    def refuse_unscaled(
        self, tensors: Sequence[torch.Tensor], optimizers: Callable[[], Iterable[Optimizer]], *, is_first: bool
    ) -> None:
        """Make sure that gradients are averaged before they are unscaled.

        Args:
            tensors: Tensors that are about to be averaged.
            optimizers: Function that returns the attached optimizers.
            is_first: Whether these are the first tensors of the step. If so, no gradient at all may be unscaled: the
                tensors may be buckets of gradients. Later tensors may be other values, and are checked themselves.

        Raises:
            ManagerError: A scaler has unscaled one of the tensors; or, for the first tensors, any gradient.
        """
        for scaler in self._known_in_step:
            # With a default, because a disabled scaler lacks this attribute.
            for key, state in getattr(scaler, "_per_optimizer_states", {}).items():
                if state["stage"] is not OptState.UNSCALED:
                    continue
                optimizer = next((each for each in optimizers() if id(each) == key), None)
                unscaled = {id(each.grad) for each in parameters_of([optimizer] if optimizer is not None else [])}
                if is_first or any(id(tensor) in unscaled for tensor in tensors):
                    raise ManagerError(
                        "expected gradients that are still scaled, got some that scaler.unscale_ has unscaled already: "
                        "an overflow on one replica would be an infinity on all, and only that replica's scaler would "
                        "skip the step; average gradients first, and call scaler.unscale_, clipping, scaler.step and "
                        "scaler.update inside `if manager.should_commit():`"
                    )


def nonfinite_parameters(registry: StateRegistry, optimizers: Iterable[Optimizer]) -> list[str]:
    """Return the names of parameters that contain a NaN or an infinity. Takes 0.05 s for each GiB of parameters."""
    names = {
        id(parameter): f"{key}.{name}"
        for key, module in registry.holders(nn.Module).items()
        for name, parameter in module.named_parameters()
    }
    parameters = {id(each): each for each in parameters_of([*registry.holders(Optimizer).values(), *optimizers])}
    return [
        names.get(key, f"a parameter {list(each.shape)}") for key, each in parameters.items() if not _is_finite(each)
    ]


def _is_finite(parameter: torch.Tensor) -> bool:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter).detach()
    if not (local.is_floating_point() and local.numel()):
        return True
    try:
        # Minimum and maximum are NaN if any element is. Unlike ``isfinite`` of all elements, this needs no memory.
        return all(bool(extreme.isfinite()) for extreme in torch.aminmax(local))
    except (NotImplementedError, RuntimeError):  # tensors of 8 bits, sparse tensors, tensors that wrap others
        return True


def _calling_scaler() -> GradScaler | None:
    """Return the scaler that is a caller of this function, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCALER_MODULE:
            caller: Any = frame.f_locals.get("self")
            return caller if isinstance(caller, GradScaler) else None
        frame = frame.f_back
    return None
