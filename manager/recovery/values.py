"""The options and the result of a recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

_MAX_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The result of `Manager.recover` or `Manager.resume`.

    Attributes:
        step: The committed step that this replica's state shows now.
        source: The address or directory that the state came from.
    """

    step: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How the state of a peer is received; see `StateManager.recover`.

    Attributes:
        timeout: For all of it.
        unreachable_timeout: How long the peer may be out of reach before the first byte; ``None``: ``timeout``.
        progress_timeout: How long the transfer may go without a byte; ``None``: ``timeout``.
        is_fresh: Whether the step has to be the peer's present state.
        verify: Whether the loaded state is compared with the peer's.
        is_warm: Whether it is received before a quorum, in which only what has changed since is.
        max_bytes_per_s: How fast at most; ``None`` for as fast as it goes.
        others: Addresses of further peers that hold the same state, read from at once.
        relays: Addresses of all that receive this state now, this replica's own too.
        keep_partial: Whether the next recovery goes on from what this one has received, where it fails. What has landed
            is not overwritten then; nothing but the mark of a partial state keeps a step from being taken with it.
    """

    timeout: timedelta
    unreachable_timeout: timedelta | None = None
    progress_timeout: timedelta | None = None
    is_fresh: bool = False
    verify: bool = True
    is_warm: bool = False
    max_bytes_per_s: float | None = None
    others: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    keep_partial: bool = False


def shown(differences: Sequence[str]) -> str:
    """Return the first few differences, for a message."""
    return "; ".join(differences[:_MAX_SHOWN]) + ("; …" if len(differences) > _MAX_SHOWN else "")
