"""Phases with a result: what this rank's part returns, on top of votes and of an exchange of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.exchange import Exchange

T = TypeVar("T")


class Phases:
    """The phases of one operation. Every method is called on all ranks alike, by one thread, and ends in a vote.

    An exchange of data is a phase by itself, which begins only after all ranks have got there: so no rank waits in gloo
    for one that has failed before.

    Args:
        agreement: Of the group, for this thread alone.
        exchange: Of the group, for this thread alone.
        suffix: Behind the name of each phase, for errors.

    Attributes:
        agreement: The same.
        exchange: The same.
    """

    def __init__(self, agreement: Agreement, exchange: Exchange, suffix: str = "") -> None:
        self.agreement: Final = agreement
        self.exchange: Final = exchange
        self._suffix = suffix

    def name(self, phase: str) -> str:
        """The name of a phase as errors have it."""
        return phase + self._suffix

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """Runs ``action`` on every rank, and returns what it returned on this one.

        Raises:
            TransportError: A rank failed, or is gone; the same error on all of them.
        """
        results: list[T] = []
        self.agreement.run_on_all_ranks(self.name(phase), lambda: results.append(action()))
        return results[0]

    def run_on_first(self, phase: str, action: Callable[[], T]) -> T | None:
        """Runs ``action`` on the first rank, and returns there what it returned; ``None`` on the others."""
        results: list[T] = []
        self.agreement.on_first(self.name(phase), lambda: results.append(action()))
        return results[0] if results else None

    def gather(self, phase: str, data: bytes) -> list[bytes]:
        """Brings what every rank has to the first, which gets it by rank; the others get nothing."""
        return self._exchange(phase, lambda: self.exchange.gather(data)) or []

    def scatter(self, phase: str, data: Sequence[bytes] | None) -> bytes:
        """Gives each rank what the first has for it."""
        return self._exchange(phase, lambda: self.exchange.scatter(data))

    def broadcast(self, phase: str, data: bytes | None) -> bytes:
        """Gives all ranks what the first has."""
        return self._exchange(phase, lambda: self.exchange.broadcast(data))

    def _exchange(self, phase: str, action: Callable[[], T]) -> T:
        return self.run(phase, self.exchange.ending_on_failure(action))
