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
        in_quorum: Whether the step has to be the peer's present state, and the next recovery goes on from the data of
            this one if it fails. That data is not overwritten then; nothing but the mark of a partial state keeps a
            step from being taken with it.
        verify: Whether the loaded state is compared with the peer's.
        max_bytes_per_s: Limit of the rate before a quorum, in which only later changes are received; otherwise
            ``None``.
        others: Addresses of further peers that hold the same state, read from at once.
        relays: Addresses of all that receive this state now, this replica's own too.
    """

    timeout: timedelta
    unreachable_timeout: timedelta | None = None
    progress_timeout: timedelta | None = None
    in_quorum: bool = False
    verify: bool = True
    max_bytes_per_s: float | None = None
    others: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()

    @property
    def is_warm(self) -> bool:
        """Whether the state is received before a quorum."""
        return self.max_bytes_per_s is not None


def shown(differences: Sequence[str]) -> str:
    """Return the first few differences, for a message."""
    return "; ".join(differences[:_MAX_SHOWN]) + ("; …" if len(differences) > _MAX_SHOWN else "")
