"""Checks that a peer's state fits this replica, before the first byte of the state arrives.

Also warns if the loaded state replaces hyperparameters with which this process was started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ft_transport.state.matching import Incoming
from manager.errors import RegistryError
from manager.state.parameter_order import MANAGER_KEY, USER_KEY
from manager.state.registry import StateEntry, StateRegistry, listed

logger = logging.getLogger(__name__)


def check_fit(
    incoming: Incoming,
    registry: StateRegistry,
    own_state: Mapping[str, object],
    *,
    note: str = "",
    keys_note: str = "",
    only_shared: bool = False,
) -> None:
    """Raise an error if the registered objects could not load a peer's state exactly.

    Without this check, unknown keys would fail in the middle of loading, torch would round tensors of other dtypes
    silently, and an optimizer or scheduler of another class would lack values. Only modules, optimizers and schedulers
    are compared in detail, because a user's own functions may load other states on purpose. The caller has already
    matched the order of the optimizers' parameters (``manager.state.parameter_order``).

    Args:
        incoming: Description of the state that the peer is about to send.
        registry: The objects registered here.
        own_state: The result of ``ReplicaState.content`` on this replica.
        note: Text at the end of messages about tensors: the origin of the tensors, or advice.
        keys_note: Text at the end of messages about keys.
        only_shared: Whether to accept keys that only one side has, as long as both sides share at least one key.

    Raises:
        RegistryError: The state does not fit; nothing has been received.
    """
    for part in (USER_KEY, MANAGER_KEY):
        if incoming.keys(part) is None:
            raise RegistryError(
                f"expected a replica's state with the part {part!r}, which is missing; nothing was received",
                keys=(part,),
            )
    keys = incoming.keys(USER_KEY) or ()
    if not (only_shared and set(keys).intersection(registry.registered_keys())):
        registry.check_keys(keys, note=keys_note)
    own_parts = own_state[USER_KEY]
    assert isinstance(own_parts, Mapping), "a replica's state has its parts by key"
    for entry in registry.entries("replicated"):
        if entry.key not in keys:
            continue
        holder, own = entry.holder, own_parts.get(entry.key)
        match holder:
            case torch.nn.Module():
                is_free = names_loaded_freely(holder)
                _check_names(incoming, entry, is_free, own)
                _check_tensors(incoming, entry, is_free, note)
            case Optimizer():
                # A class with its own load function may accept states that torch's function refuses.
                if type(holder).load_state_dict is Optimizer.load_state_dict:
                    _check_groups(incoming, entry, own)
                # A load replaces each state as a whole, so the sender's lengths and dtypes are right.
                _check_tensors(incoming, entry, lambda _name: True, note)
            case LRScheduler() if isinstance(own, Mapping):
                _check_parts(entry, own, incoming.keys(USER_KEY, entry.key))


class ModuleGlance:
    """Detects cheaply that modules have gained or lost tensors, or that shapes of buffers have changed.

    Does not detect new shapes of parameters, which show in the optimizers, nor a module that replaces another module.

    Args:
        holders: Registered objects; those that are no modules are ignored.
    """

    def __init__(self, holders: Iterable[object]) -> None:
        modules = [each for holder in holders if isinstance(holder, torch.nn.Module) for each in holder.modules()]
        self._contents = [part for each in modules for part in (each._parameters, each._buffers, each._modules)]
        self._buffers = [each._buffers for each in modules if each._buffers]
        self._seen = self._present()

    def shows_change(self) -> bool:
        """Return whether a module has changed since this object was made."""
        return self._present() != self._seen

    def _present(self) -> tuple[list[int], list[torch.Size]]:
        try:
            shapes = [buffer.shape for buffers in self._buffers for buffer in buffers.values() if buffer is not None]
        except RuntimeError:  # a lazy module's buffers have no shape before the first step
            shapes = []
        return list(map(len, self._contents)), shapes


def tables_of(registry: StateRegistry) -> dict[str, dict[str, str]]:
    """Describe each registered entry. Before a heal, replicas compare their descriptions.

    A description contains exactly what `check_fit` always compares: the tensors of modules and the parameter groups of
    optimizers that torch's own functions load.

    Returns:
        The descriptions, by key of the entry and by name of the tensor or group. A tensor is described by dtype and
        shape (a DTensor also by the shape of this rank's shard), a group by its number of parameters.
    """
    return {entry.key: _table(entry) for entry in registry.entries("replicated")}


def _table(entry: StateEntry) -> dict[str, str]:
    holder = entry.holder
    try:
        if isinstance(holder, torch.nn.Module):
            is_free, state = names_loaded_freely(holder), cast("Any", entry.state_dict())
            # A lazy module without shapes accepts the shapes of a peer.
            if any(map(is_lazy, state.values())):
                return {}
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            return {name: _form(value) for name, value in tensors.items() if not is_free(name)}
        if isinstance(holder, Optimizer) and type(holder).load_state_dict is Optimizer.load_state_dict:
            return {
                f"param_groups.{index}": f"{len(group['params'])} parameters"
                for index, group in enumerate(holder.param_groups)
            }
    # For parameters without shapes, and state functions that fail: a snapshot will report the error.
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.debug("the state %r is not compared between replicas: %s", entry.key, error)
    return {}


def _form(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor)
    part = f" (shard {list(local.shape)})" if local is not tensor else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{part}"


def names_loaded_freely(module: torch.nn.Module) -> Callable[[str], bool]:
    """Return a predicate of a tensor's name: whether a submodule with a load function of its own loads that tensor.

    Such a submodule may accept other shapes, dtypes and names than its state has now. Examples are observers of
    quantization, memory banks that grow, and extra states. Torch's load function refuses other shapes, and rounds to
    the module's dtype.
    """
    if not _is_of_torch(type(module).load_state_dict):
        return lambda _name: True
    prefixes: list[str] = []
    for name, each in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        hooks = [*each._load_state_dict_pre_hooks.values(), *each._load_state_dict_post_hooks.values()]
        if not all(map(_is_of_torch, (type(each)._load_from_state_dict, *hooks))):
            prefixes.append(prefix)
        if type(each).set_extra_state is not torch.nn.Module.set_extra_state:
            prefixes.append(f"{prefix}_extra_state")
    all_prefixes = tuple(prefixes)
    return lambda name: name.startswith(all_prefixes)


def _is_of_torch(function: Any) -> bool:
    """Return whether a load function is one of torch's that refuse other shapes; false for that of a lazy module."""
    function = getattr(function, "hook", function)
    origin = getattr(getattr(function, "func", function), "__module__", None) or ""
    return origin.startswith(("torch.nn.", "torch.distributed.")) and origin != torch.nn.modules.lazy.__name__


def _check_names(incoming: Incoming, entry: StateEntry, is_free: Callable[[str], bool], own: object) -> None:
    if not isinstance(own, Mapping):
        return
    received = dict.fromkeys(incoming.keys(USER_KEY, entry.key) or ())
    missing = [name for name in own if name not in received and not is_free(name)]
    unexpected = [name for name in received if name not in own and not is_free(name)]
    if missing or unexpected:
        raise RegistryError(
            f"expected the state of the same module under {entry.key!r}; missing: {listed(missing)}, unexpected: "
            f"{listed(unexpected)}; nothing was received",
            keys=(entry.key,),
        )


def _check_groups(incoming: Incoming, entry: StateEntry, own: object) -> None:
    groups = own.get("param_groups") if isinstance(own, Mapping) else None
    if not isinstance(groups, list):
        return
    path = (USER_KEY, entry.key, "param_groups")
    numbers = [incoming.num_items(*path, index, "params") for index in range(incoming.num_items(*path) or 0)]
    own_numbers = [len(group["params"]) for group in groups]
    if numbers != own_numbers:
        raise RegistryError(
            f"expected an optimizer with the same parameter groups under {entry.key!r}; its groups have "
            f"{own_numbers} parameters here and {numbers} there; nothing was received",
            keys=(entry.key,),
        )
    for index, group in enumerate(groups):
        _check_parts(entry, group, incoming.keys(*path, index))


def _check_parts(entry: StateEntry, own: Mapping[str, object], received: Collection[str] | None) -> None:
    missing = [name for name in own if name not in (received or ())]
    if missing:
        raise RegistryError(
            f"expected the state of the same class under {entry.key!r}, but the peer's state lacks {listed(missing)}; "
            "nothing was received",
            keys=(entry.key,),
        )


def _check_tensors(incoming: Incoming, entry: StateEntry, is_free: Callable[[str], bool], note: str) -> None:
    prefix = f"{USER_KEY}.{entry.key}."
    found = [(each.path.removeprefix(prefix), each) for each in incoming.mismatches if each.path.startswith(prefix)]
    differing = [
        f"{name} is {mismatch.own} here and {mismatch.received} there"
        for name, mismatch in found
        if mismatch.is_division or not is_free(name)
    ]
    if differing:
        raise RegistryError(
            f"expected tensors of the same dtypes, shapes and shards under {entry.key!r}; {listed(differing)}; nothing "
            f"was received{f' ({note})' if note else ''}",
            keys=(entry.key,),
        )


WITHOUT_EFFECT: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that are not compared: names have a check of their own, and kernels may differ between replicas."""
_SCHEDULED: Final = frozenset({"lr", "momentum", "betas"})
"""Hyperparameters that torch's schedulers change. The configured learning rate remains in ``initial_lr``."""
_MAX_VALUE: Final = 60
"""Maximum characters of one hyperparameter in a message."""


class ConfiguredHyperparameters:
    """Warns if the first state that a process loads has other hyperparameters than those the process was started with.

    A replica that is restarted with a new learning rate goes on with the old one, which the loaded state contains.
    Later loads are not compared: by then the training loop may have changed the values.
    """

    def __init__(self) -> None:
        self._own: dict[str, str] | None = None

    def note(self, registry: StateRegistry, attached: Sequence[Optimizer], *, has_trained: bool) -> None:
        """Store the present hyperparameters before the first load; later calls do nothing.

        Args:
            registry: The registered optimizers.
            attached: The attached optimizers.
            has_trained: Whether a step was committed. If so, nothing is compared: training may have changed the values.
        """
        if self._own is None:
            self._own = {} if has_trained else dict(_hyperparameters_of(named_optimizers(registry, attached)))

    def warn_of_replaced(self, registry: StateRegistry, attached: Sequence[Optimizer], step: int) -> None:
        """After the first load, log the hyperparameters that the state of ``step`` has replaced."""
        own, self._own = self._own, {}
        if not own:
            return
        loaded = dict(_hyperparameters_of(named_optimizers(registry, attached)))
        replaced = [
            f"{name} {text[:_MAX_VALUE]} by {loaded[name][:_MAX_VALUE]}"
            for name, text in own.items()
            if loaded.get(name, text) != text
        ]
        if replaced:
            logger.warning(
                "the state of step %d replaces hyperparameters that this process was started with: %s; if you meant "
                "to change them, set the new values on all replicas at the same step, after the state is loaded "
                "(docs/changing-a-job.md); if the loop's own schedule has changed them, ignore this",
                step,
                listed(replaced),
            )


def plain(value: object) -> object:
    """Return the number in a one-element CPU tensor; ``None`` for other objects."""
    # To read a tensor on a device, the training thread would have to wait for the device.
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    return None


def leaves(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the ``repr`` of each hyperparameter that replicas compare in a parameter group."""
    for name, value in group.items():
        number = plain(value) if isinstance(value, torch.Tensor) else value
        # The ``repr`` of other objects may contain their address.
        if name not in WITHOUT_EFFECT and isinstance(number, (bool, int, float, str, tuple, list, type(None))):
            yield name, repr(number)


def named_optimizers(registry: StateRegistry, attached: Sequence[Optimizer]) -> list[tuple[str, Optimizer]]:
    """Return names and optimizers: first the optimizers that are registered as replicated state, then the others."""
    registered = registry.holders(Optimizer)
    known = set(map(id, registry.holders(Optimizer, None).values()))
    others = [(f"attached optimizer {index}", each) for index, each in enumerate(dict.fromkeys(attached))]
    return [*registered.items(), *(each for each in others if id(each[1]) not in known)]


def _hyperparameters_of(optimizers: list[tuple[str, Optimizer]]) -> Iterator[tuple[str, str]]:
    for key, optimizer in optimizers:
        # A wrapper may have the class of an optimizer, but not its attributes.
        for index, group in enumerate(getattr(optimizer, "param_groups", ())):
            scheduled = _SCHEDULED if "initial_lr" in group else ()
            yield from (
                (f"{key}.param_groups.{index}.{name}", text) for name, text in leaves(group) if name not in scheduled
            )
