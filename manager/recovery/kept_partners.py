"""Copies the kept states of ranks to ranks on other hosts, their partners, behind the training.

A rank that has kept a step posts the address of its snapshot. Its partner fetches the snapshot, and the partner's
keeper holds the copy. Only then the partner reports the step (``kept_steps``). So when all ranks have reported a step,
all of its copies exist, and each rank retains its snapshot until then.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from ft_transport import FetchTimeout, TransportError
from ft_transport.coordination.ranks import RankGroup, decode_message
from ft_transport.runtime.signal_safe import SafeEvent
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.transfer.kept import KeptSnapshots
from ft_transport.transfer.kept_copies import Offer, offer_decoder, sources_of, twins_of
from ft_transport.transfer.kept_part import KeptPart
from manager.recovery.kept_steps import KeepSettings, KeptSteps

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

logger = logging.getLogger(__name__)

_LEAST_BYTES_PER_S: Final = 64e6
_SHARE_OF_INTERVAL: Final = 0.5
"""Share of the time between two kept steps over which a copy is spread."""
_LEAST_COPY_S: Final = 60.0
_UNREACHABLE: Final = timedelta(seconds=10)
_MAX_FAILED: Final = 3
"""So often a step is given up, because a copy has failed, before steps are kept without copies."""
_MAX_SOURCES: Final = 100
"""A keeper can pass about 250 files to a successor (``SCM_MAX_FD``), two for each source."""


class KeptPartners:
    """Fetches copies of other ranks' kept states. One thread calls `copy`; any thread calls `cancel`.

    Args:
        group: The ranks of the replica.
        kept: The kept snapshots of this rank.
        transport: Fetches.
        settings: The number of copies, and the failure domain of this rank.
        counts: Metrics: the number of copies, and of copies that failed.

    Attributes:
        partners: Ranks that copy this rank's state.
    """

    def __init__(
        self,
        group: RankGroup,
        kept: KeptSnapshots,
        transport: HTTPTransport[Any],
        settings: KeepSettings,
        counts: MetricValues,
    ) -> None:
        self._rank, self._num_ranks = group.rank, group.size
        self._kept = kept
        self._transport = transport
        self._copies = settings.copies
        self._domain = settings.domain if settings.domain is not None else socket.gethostname()
        self._counts = counts
        self.partners: tuple[int, ...] = ()
        self._sources: tuple[int, ...] | None = None
        self._twins: dict[int, tuple[int, ...]] = {}
        self._num_failed = 0
        self._cancel: Callable[[str], None] | None = None

    def copy(self, part: KeptPart, steps: KeptSteps, interval_s: float, stop: SafeEvent) -> bool:
        """Offer this rank's kept part, and copy those of the ranks whose partner this rank is.

        Args:
            part: The part of this rank.
            steps: Exchanges the addresses.
            interval_s: Time between two kept steps, in seconds; 0 to copy at full speed.
            stop: Once set, nothing more is copied. `cancel` ends the present fetch.

        Returns:
            Whether this rank may report the step: it has the copies, or it has failed to get them for several steps, so
            that the step has to be kept without them.

        Raises:
            TransportError: The key-value store does not answer.
        """
        asked = self._needed()
        posted = steps.exchange(part.step, self._offer(part).encode(), asked, stop)
        if posted is None:
            return False
        offers = {rank: decode_message(each, offer_decoder) for rank, each in zip(asked, posted, strict=True)}
        if self._sources is None:
            self._plan([offers[rank] for rank in range(self._num_ranks)])
        outcomes = [self._copy(part.of_rank(source), offers, interval_s, stop) for source in self._sources or ()]
        self._num_failed = 0 if all(outcomes) else self._num_failed + 1
        if stop.is_set():
            return False
        if self._num_failed == _MAX_FAILED:
            logger.warning("step %d: kept without copies, which have failed %d times", part.step, self._num_failed)
        # Until a copy succeeds: ranks that failed at different steps would never report the same one.
        return all(outcomes) or self._num_failed >= _MAX_FAILED

    def copy_timeout_s(self, interval_s: float) -> float:
        """Return the longest time that the copies of a step may take, in seconds."""
        num_bytes = max(1, len(self._sources or ())) * self._kept.largest_bytes
        return max(_LEAST_COPY_S, 2 * interval_s, 2 * num_bytes / _LEAST_BYTES_PER_S)

    def cancel(self) -> None:
        """End the present fetch, if there is one."""
        cancel = self._cancel
        if cancel is not None:
            cancel("the process ends, or its state was replaced")

    def _offer(self, part: KeptPart) -> Offer:
        try:
            address, first = self._kept.share(part)
        except TransportError as error:
            logger.warning("step %d: this rank cannot serve its kept state to its partner: %s", part.step, error)
            address, first = "", 0
        return Offer(address=address, first=first, domain=self._domain)

    def _needed(self) -> Sequence[int]:
        """Return the ranks whose offers this rank needs: at first all, to find its sources and their twins."""
        if self._sources is None:
            return range(self._num_ranks)
        needed = {self._rank, *self._sources, *(twin for source in self._sources for twin in self._twins[source])}
        return sorted(needed)

    def _plan(self, offers: Sequence[Offer]) -> None:
        domains = [offer.domain for offer in offers]
        sources = [each[:_MAX_SOURCES] for each in sources_of(domains, self._copies)]
        self._sources = sources[self._rank]
        self.partners = tuple(rank for rank, each in enumerate(sources) if self._rank in each)
        self._twins = {source: twins_of(source, offers, self._copies) for source in self._sources}
        if len(set(domains)) < self._copies and self._rank == 0:
            logger.warning(
                "copies=%d, but all %d ranks are in %d failure domains: %s; pass failure_domain= if hosts share a name",
                self._copies,
                self._num_ranks,
                len(set(domains)),
                sorted(set(domains)),
            )

    def _copy(self, part: KeptPart, offers: Mapping[int, Offer], interval_s: float, stop: SafeEvent) -> bool:
        """Copy the part of another rank. Return whether this rank has it now."""
        step, source, twins = part.step, part.rank, self._twins[part.rank]
        addresses = [offers[twin].address for twin in twins]
        if not all(addresses):
            twins, addresses = (), []
        sparse = structs.replace(part, twins=twins)
        if {part, sparse} & set(self._kept.parts()):
            # After a restart: this host's keeper held the copy.
            self._counts.set("kept_copied_step", to=step)
            return True
        timeout = FetchTimeout(total=timedelta(seconds=self.copy_timeout_s(interval_s)), unreachable=_UNREACHABLE)
        settings = self._transport.fetch_settings(timeout, self._rate(interval_s))
        self._cancel = settings.timeouts.handle.cancel
        try:
            if stop.is_set() or not offers[source].address:
                return False
            self._kept.copy(sparse, offers[source].address, addresses, replace(settings, verify=True))
        except TransportError as error:
            if not stop.is_set():
                self._counts.add("kept_copies_failed_total", type(error).__name__)
                logger.warning("step %d: the state of rank %d could not be copied: %s", step, source, error)
            return False
        finally:
            self._cancel = None
        self._counts.add("kept_copies_total")
        self._counts.set("kept_copied_step", to=step)
        return True

    def _rate(self, interval_s: float) -> float | None:
        """Return the highest rate of a copy, in bytes per second: training needs most of the network."""
        if interval_s == 0:
            return None
        num_sources = len(self._sources or ())
        return max(_LEAST_BYTES_PER_S, num_sources * self._kept.largest_bytes / (_SHARE_OF_INTERVAL * interval_s))
