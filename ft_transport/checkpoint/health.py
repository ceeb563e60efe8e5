"""The health of all ranks' writers and saves: exchanged at every step, and before a save begins."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ft_transport.checkpoint.background_saver import BackgroundSaver, Pulse
from ft_transport.checkpoint.settings import BusyPolicy
from ft_transport.coordination.consensus import Agreement
from ft_transport.errors import CheckpointError, RankGoneError, SaveInProgressError, TransportError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """The result of `CheckpointStore.check_health`; the same on every rank.

    Attributes:
        dead_writers: Ranks whose writer process is dead, and is being replaced.
        num_failed_saves: Number of saves in a row that failed.
    """

    dead_writers: tuple[int, ...]
    num_failed_saves: int

    @property
    def is_good(self) -> bool:
        """Whether all writers are alive, and no save has failed."""
        return not self.dead_writers and not self.num_failed_saves


class Health:
    """Exchanges the pulses of all ranks. For the training thread; all ranks make the same calls.

    Args:
        agreement: The group's agreement, for this purpose only.
        background: This rank's saves.
    """

    def __init__(self, agreement: Agreement, background: BackgroundSaver) -> None:
        self._agreement = agreement
        self._background = background
        self._under_way: tuple[Any, list[torch.Tensor]] | None = None

    def connect(self) -> None:
        """Make the connections, so that the first step need not."""
        self._pulses()

    def check(self) -> StoreHealth:
        """See ``CheckpointStore.check_health``."""
        pulses: list[Pulse] = []
        if self._under_way is not None:
            (work, gathered), self._under_way = self._under_way, None
            try:
                self._agreement.exchange.wait(work)
                pulses = [Pulse(*each.tolist()) for each in gathered]
            except RankGoneError as error:
                # A rank was late, and gloo has closed the group; the remaining ranks report this through the store.
                logger.warning("the ranks of the store have lost each other: %s", error)
                self._meet_again()
        self._under_way = self._agreement.exchange.begin_all_gather(self._own())
        if any(pulse.is_fatal for pulse in pulses):
            self._raise_fatal()
        return StoreHealth(
            dead_writers=tuple(rank for rank, pulse in enumerate(pulses) if pulse.is_writer_dead),
            num_failed_saves=max((pulse.num_failed for pulse in pulses), default=0),
        )

    def admits(self, step: int, busy: BusyPolicy) -> bool:
        """Return whether a save may start; the same on all ranks.

        Raises:
            SaveInProgressError: The save before is not finished, and the policy is to refuse.
            TransportError: Too many saves have failed.
        """
        if busy == "wait":
            self._background.wait()
            self._background.raise_fatal()
            return True
        try:
            pulses = self._pulses()
        except RankGoneError:
            self._meet_again()
            pulses = self._pulses()
        if any(pulse.is_fatal for pulse in pulses):
            self._raise_fatal()
        if not any(pulse.is_busy for pulse in pulses):
            # Other ranks may have learned of the end of the save a moment before this rank.
            self._background.wait()
            return True
        if busy == "error":
            raise SaveInProgressError("expected the save before to be finished", step=step)
        logger.warning("step %d is not saved: the save before is not finished", step)
        return False

    def close(self) -> None:
        """Wait for the current save, and close the connections."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with suppress(TransportError):
                self._agreement.exchange.wait(under_way[0])
        self._agreement.close()

    def _own(self) -> torch.Tensor:
        return torch.tensor(self._background.pulse(), dtype=torch.int64)

    def _pulses(self) -> list[Pulse]:
        return [Pulse(*each.tolist()) for each in self._agreement.exchange.all_gather(self._own())]

    def _meet_again(self) -> None:
        self._under_way = None
        self._agreement.run_on_all_ranks("meet again", lambda: None)
        self._agreement.reconnect()

    def _raise_fatal(self) -> None:
        # Another rank may have learned of the end of the save a moment before this rank.
        self._background.wait()
        self._background.raise_fatal()
        raise CheckpointError("expected fewer saves in a row to fail; see the warnings of the other ranks")
