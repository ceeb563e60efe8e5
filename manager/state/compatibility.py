"""Checks that a peer's state fits this replica before its first byte, and warns if it replaces hyperparameters."""

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
    """Refuse a state that the registered objects could not load exactly.

    Otherwise unknown keys would fail in the middle of loading, other dtypes would be rounded silently, and an optimizer
    or scheduler of another class would lack values that it needs. Only modules, optimizers and schedulers are compared
    in detail: a user's own functions may load other states on purpose. The order of an optimizer's parameters already
    matches (``manager.state.parameter_order``).

    Args:
        incoming: Describes the state that a peer is about to send.
        registry: The objects registered here.
        own_state: The result of ``ReplicaState.content``.
        note: Added to messages about tensors that differ: their origin, or advice.
        keys_note: Added to messages about keys that differ.
        only_shared: Whether to compare only keys that both sides have, if any.

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
                # A class with its own load function may accept states that torch's refuses.
                if type(holder).load_state_dict is Optimizer.load_state_dict:
                    _check_groups(incoming, entry, own)
                # A load replaces each state as a whole: its length may differ, and the sender's dtype applies.
                _check_tensors(incoming, entry, lambda _name: True, note)
            case LRScheduler() if isinstance(own, Mapping):
                _check_parts(entry, own, incoming.keys(USER_KEY, entry.key))


class ModuleGlance:
    """Detects cheaply that modules have gained or lost tensors, or that shapes of buffers have changed.

    Does not detect new shapes of parameters, which optimizers reveal, nor a module that replaces another.

    Args:
        holders: Registered objects; only modules count.
    """

    def __init__(self, holders: Iterable[object]) -> None:
        modules = [each for holder in holders if isinstance(holder, torch.nn.Module) for each in holder.modules()]
        self._contents = [part for each in modules for part in (each._parameters, each._buffers, each._modules)]
        self._buffers = [each._buffers for each in modules if each._buffers]
        self._seen = self._present()

    def shows_change(self) -> bool:
        """Return whether a module has changed since the construction of this object."""
        return self._present() != self._seen

    def _present(self) -> tuple[list[int], list[torch.Size]]:
        try:
            shapes = [buffer.shape for buffers in self._buffers for buffer in buffers.values() if buffer is not None]
        except RuntimeError:  # buffers of a lazy module before the first step
            shapes = []
        return list(map(len, self._contents)), shapes


def tables_of(registry: StateRegistry) -> dict[str, dict[str, str]]:
    """Describe each registered part, for other replicas to compare before a heal.

    Covers exactly the parts that `check_fit` always compares: tensors of modules, and parameter groups of optimizers,
    that load as torch's do. The text of a tensor has dtype, shape and, for a DTensor, the shape of this rank's part.
    """
    return {entry.key: _table(entry) for entry in registry.entries("replicated")}


def _table(entry: StateEntry) -> dict[str, str]:
    holder = entry.holder
    try:
        if isinstance(holder, torch.nn.Module):
            is_free, state = names_loaded_freely(holder), cast("Any", entry.state_dict())
            # A module without shapes yet accepts those of a peer.
            if any(map(is_lazy, state.values())):
                return {}
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            return {name: _looks(value) for name, value in tensors.items() if not is_free(name)}
        if isinstance(holder, Optimizer) and type(holder).load_state_dict is Optimizer.load_state_dict:
            return {
                f"param_groups.{index}": f"{len(group['params'])} parameters"
                for index, group in enumerate(holder.param_groups)
            }
    # Uninitialised parameters or functions that fail: a snapshot reports them.
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.debug("%r is not compared with the other replicas': %s", entry.key, error)
    return {}


def _looks(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor)
    part = f" (of it {list(local.shape)})" if local is not tensor else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{part}"


def names_loaded_freely(module: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether a name of the module's state belongs to a submodule with its own loading.

    Such a submodule may accept other shapes, dtypes and names than its own: observers of quantization, banks that grow,
    extra states. Torch's loading rounds to the module's dtype and refuses other shapes.
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
    """Return whether a load function is torch's own, which refuses other shapes (except for lazy modules)."""
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
            f"expected an optimizer with the same parameter groups under {entry.key!r}; their parameters are "
            f"{own_numbers} here and {numbers} there; nothing was received",
            keys=(entry.key,),
        )
    for index, group in enumerate(groups):
        _check_parts(entry, group, incoming.keys(*path, index))


def _check_parts(entry: StateEntry, own: Mapping[str, object], received: Collection[str] | None) -> None:
    missing = [name for name in own if name not in (received or ())]
    if missing:
        raise RegistryError(
            f"expected the state of the same class under {entry.key!r}, what comes has no {listed(missing)}; nothing "
            "was received",
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
            f"expected tensors of the same dtypes, shapes and parts under {entry.key!r}; {listed(differing)}; nothing "
            f"was received{f' ({note})' if note else ''}",
            keys=(entry.key,),
        )


WITHOUT_EFFECT: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Not compared: each replica chooses its kernels, and the structure of the state covers names."""
_SCHEDULED: Final = frozenset({"lr", "momentum", "betas"})
"""Values that torch's schedulers change in a group; ``initial_lr``, which schedulers add, keeps the configured one."""
_MAX_VALUE: Final = 60


class ConfiguredHyperparameters:
    """Warns if the first state that a process loads has other hyperparameters than the process's configuration.

    A replica restarted with another learning rate continues with the old one, as the other replicas do. Later loads are
    not compared: by then the loop itself has changed the values.
    """

    def __init__(self) -> None:
        self._own: dict[str, str] | None = None

    def note(self, registry: StateRegistry, attached: Sequence[Optimizer], *, has_trained: bool) -> None:
        """Remember the present values before the first load; later calls do nothing.

        Args:
            registry: The registered optimizers.
            attached: The attached optimizers.
            has_trained: Whether a step was committed, so that the values may no longer be the configured ones.
        """
        if self._own is None:
            self._own = {} if has_trained else dict(_hyperparameters_of(named_optimizers(registry, attached)))

    def warn_of_replaced(self, registry: StateRegistry, attached: Sequence[Optimizer], step: int) -> None:
        """Log the values that the state of ``step`` has replaced; only after the first load."""
        own, self._own = self._own, {}
        if not own:
            return
        loaded = dict(_hyperparameters_of(named_optimizers(registry, attached)))
        replaced = [
            f"{name} {told[:_MAX_VALUE]} by {loaded[name][:_MAX_VALUE]}"
            for name, told in own.items()
            if loaded.get(name, told) != told
        ]
        if replaced:
            logger.warning(
                "the state of step %d replaces hyperparameters that this process was started with: %s; where no "
                "schedule of the loop has changed them, set them on all replicas at one step, after the state is "
                "loaded (docs/changing-a-job.md)",
                step,
                listed(replaced),
            )


def plain(value: object) -> object:
    """Return a one-element CPU tensor's value, for encoders of plain values; ``None`` for other objects."""
    # Reading a device tensor would make the training thread wait for the device.
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    return None


def leaves(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each printable hyperparameter of a parameter group."""
    for name, value in group.items():
        told = plain(value) if isinstance(value, torch.Tensor) else value
        # The text of other objects may contain their address.
        if name not in WITHOUT_EFFECT and isinstance(told, (bool, int, float, str, tuple, list, type(None))):
            yield name, repr(told)


def named_optimizers(registry: StateRegistry, attached: Sequence[Optimizer]) -> list[tuple[str, Optimizer]]:
    """Return the optimizers registered as replicated state, then those only attached, with names."""
    registered = registry.holders(Optimizer)
    known = set(map(id, registry.holders(Optimizer, None).values()))
    others = [(f"attached optimizer {index}", each) for index, each in enumerate(dict.fromkeys(attached))]
    return [*registered.items(), *(each for each in others if id(each[1]) not in known)]


def _hyperparameters_of(optimizers: list[tuple[str, Optimizer]]) -> Iterator[tuple[str, str]]:
    for key, optimizer in optimizers:
        # A wrapper may be an optimizer by its class alone.
        for index, group in enumerate(getattr(optimizer, "param_groups", ())):
            scheduled = _SCHEDULED if "initial_lr" in group else ()
            yield from (
                (f"{key}.param_groups.{index}.{name}", told) for name, told in leaves(group) if name not in scheduled
            )
