"""Whether what is trained is also registered: otherwise replicas train on with different parameters, unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manager.errors import RegistryError
from manager.state.guarded_memory import storage_of, tensors_in
from manager.state.registry import StateRegistry

logger = logging.getLogger(__name__)

_MAX_SHOWN = 5


def check_registered(registry: StateRegistry, optimizers: Sequence[Optimizer]) -> None:
    """Refuse attached optimizers, and parameters that they step, which no registered state holds.

    State functions of one's own may return copies, or an optimizer's state in another form: where there are any, what
    cannot be found is a warning.

    Args:
        registry: What is registered.
        optimizers: Those that are attached.

    Raises:
        RegistryError: Nothing is registered, or a part of what is trained is not; the message names it.
    """
    entries = registry.entries("replicated")
    if not entries:
        raise RegistryError(
            "expected a registered state to keep equal on all replicas, got none; call "
            "manager.register('model', model) and manager.register('optimizer', optimizer) before start_quorum"
        )
    if not optimizers:
        return
    try:
        state = {**registry.state_dict("local"), **registry.state_dict("replicated")}
    except RegistryError as error:
        logger.debug("what is registered cannot be compared with what is trained: %s", error)
        return
    missing = [*_missing_optimizers(registry, state, optimizers), *_missing_parameters(state, optimizers)]
    if not missing:
        return
    shown = "; ".join(missing[:_MAX_SHOWN])
    if len(missing) > _MAX_SHOWN:
        shown += f"; {len(missing) - _MAX_SHOWN} more"
    told = (
        f"expected everything that attached optimizers train to be registered, and this is not: {shown}; without "
        "manager.register(key, object) replicas train on with different values"
    )
    if all(isinstance(entry.holder, (nn.Module, Optimizer, LRScheduler)) for entry in entries):
        raise RegistryError(told, keys=tuple(entry.key for entry in entries))
    logger.warning("%s (a registered function may return it as a copy)", told)


def _missing_optimizers(
    registry: StateRegistry, state: Mapping[str, object], optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    registered = {id(entry.holder) for entry in registry.entries()}
    # A function of one's own may return an optimizer's state as a part of what it returns.
    nested = [len(groups) for value in state.values() for groups in _parameter_groups_in(value)]
    for index, optimizer in enumerate(dict.fromkeys(optimizers)):
        if id(optimizer) not in registered and len(optimizer.param_groups) not in nested:
            yield f"the attached optimizer {index} ({type(optimizer).__name__})"


def _parameter_groups_in(value: object) -> Iterator[Sequence[object]]:
    if isinstance(value, Mapping):
        groups = value.get("param_groups")
        if isinstance(groups, list):
            yield groups
        else:
            for item in value.values():
                yield from _parameter_groups_in(item)


def _missing_parameters(state: Mapping[str, object], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    held = {storage_of(tensor) for tensor in tensors_in(state)}
    for optimizer in dict.fromkeys(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.numel() and storage_of(parameter) not in held:
                    name = f"parameter {index} of group {group_index} {list(parameter.shape)}"
                    yield f"{name} of the attached {type(optimizer).__name__}"
