"""Whether a peer's state fits this replica, asked before the first byte of it lands in the replica's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ft_transport import Incoming
from manager.errors import RegistryError
from manager.registry import StateEntry, StateRegistry

USER_KEY: Final = "user"
MANAGER_KEY: Final = "manager"
_MAX_SHOWN: Final = 5


def check_fit(incoming: Incoming, registry: StateRegistry, own_state: Mapping[str, object]) -> None:
    """Refuse a state that what is registered here could not hold exactly.

    Other keys would fail in the middle of loading, and other dtypes would be rounded without a word. Only modules and
    optimizers are compared in detail: functions of the user's own may take other sizes on purpose.

    Args:
        incoming: What a peer is about to send.
        registry: What is registered here.
        own_state: What ``Manager.replica_state`` returned.

    Raises:
        RegistryError: It does not fit; nothing has been received.
    """
    for part in (USER_KEY, MANAGER_KEY):
        if incoming.keys(part) is None:
            raise RegistryError(
                f"expected a replica's state with the part {part!r}, which is missing; nothing was received",
                keys=(part,),
            )
    registry.check_keys(incoming.keys(USER_KEY) or ())
    own_parts = own_state[USER_KEY]
    assert isinstance(own_parts, Mapping), "a replica's state has its parts by key"
    for entry in registry.entries("replicated"):
        holder = getattr(entry.load_state_dict, "__self__", None)
        if isinstance(holder, torch.nn.Module):
            _check_names(incoming, entry, holder, own_parts.get(entry.key))
        if isinstance(holder, (torch.nn.Module, torch.optim.Optimizer)):
            _check_tensors(incoming, entry)


def _check_names(incoming: Incoming, entry: StateEntry, module: torch.nn.Module, own: object) -> None:
    names = incoming.keys(USER_KEY, entry.key)
    # A class with a loading of its own may take what torch's does not.
    if not isinstance(own, Mapping) or type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return
    received = dict.fromkeys(names or ())
    missing = [name for name in own if name not in received]
    unexpected = [name for name in received if name not in own]
    if missing or unexpected:
        raise RegistryError(
            f"expected the state of the same module under {entry.key!r}; missing: {_some(missing)}, unexpected: "
            f"{_some(unexpected)}; nothing was received",
            keys=(entry.key,),
        )


def _check_tensors(incoming: Incoming, entry: StateEntry) -> None:
    prefix = f"{USER_KEY}.{entry.key}."
    differing = [
        f"{mismatch.path.removeprefix(prefix)} is {mismatch.own} here and {mismatch.received} there"
        for mismatch in incoming.mismatches
        if mismatch.path.startswith(prefix)
    ]
    if differing:
        raise RegistryError(
            f"expected tensors of the same dtypes and shapes under {entry.key!r}; {_some(differing)}; nothing was "
            "received",
            keys=(entry.key,),
        )


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return (", ".join(texts[:_MAX_SHOWN]) or "none") + more
