"""Resumes from kept states: those of this rank's keeper, of partners' keepers, or of another number of ranks.

All ranks name the parts that they hold. A step can be loaded if each rank of the replica that kept it has its part
somewhere. A rank without its own part fetches it from a partner into a kept snapshot of its own, so that every part is
loaded, checked and compared in the same way. If the ranks or their layout are others than before, each rank fetches its
shards from all parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from ft_transport import FetchTimeout, RestoreError, TransportError
from ft_transport.coordination.agreement import Agreement
from ft_transport.transfer.kept import KeptSnapshots
from ft_transport.transfer.kept_part import KeptPart
from manager.errors import ManagerError, StateMismatchError
from manager.recovery.local_state import LocalState
from manager.recovery.peers import PeerOptions, PeerRecovery, Recovery
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_transport import HTTPTransport

logger = logging.getLogger(__name__)

_OWN: Final = "the keeper of this host"
_PARTNER: Final = "a partner's keeper"
_OTHER_LAYOUT: Final = "the keepers of {} ranks"
_MISFIT: Final = "misfit"
"""Outcome of a rank whose kept state does not fit the registered objects. Nothing was loaded."""
_MAX_SHOWN: Final = 500
_LONGEST_FETCH: Final = timedelta(minutes=30)
"""A large part may take longer than ``timeout``, which limits the time without progress."""

_Offers: TypeAlias = list[tuple[KeptPart, str]]

_outcome_decoder: Final = msgspec.msgpack.Decoder(str)
_parts_decoder: Final = msgspec.msgpack.Decoder(tuple[int, list[KeptPart]])
_offers_decoder: Final = msgspec.msgpack.Decoder(list[tuple[KeptPart, str]])


def local_key(rank: int, num_ranks: int) -> str:
    """Return the key of a rank's local state in its kept snapshots. No two ranks have the same."""
    return f"kept_local:{rank}/{num_ranks}"


class KeptResume:
    """Loads kept states, with all ranks of a replica. Only the training thread may call `resume`.

    Args:
        kept: The kept snapshots of this rank.
        state: The replica's state.
        transport: Fetches parts of other ranks.
        peers: Loads a served snapshot.
        local: The replica's local state.

    Attributes:
        has_failed: Whether a kept state could not be loaded on any rank; the same on all ranks.
        resumed: Rank 0's part of the step that was loaded last.
    """

    def __init__(
        self,
        kept: KeptSnapshots,
        state: ReplicaState,
        transport: HTTPTransport[Any],
        peers: PeerRecovery,
        local: LocalState,
    ) -> None:
        self._kept = kept
        self._state = state
        self._transport = transport
        self._peers = peers
        self._local = local
        self.has_failed = False
        self.resumed: KeptPart | None = None

    def resume(self, ranks: Agreement, *, at_least: int) -> Recovery | None:
        """Load the newest step of which all parts exist. If it cannot be loaded, load the one before it.

        Args:
            ranks: All ranks of the replica.
            at_least: A durable checkpoint has this step; older kept steps are not loaded. 0 without a checkpoint.

        Returns:
            The result on this rank; ``None`` if no such step could be loaded on all ranks. If a load failed halfway,
            the state is partial then.
        """
        named = ranks.values_of_all(
            "name the kept states", lambda: (at_least, list(self._kept.parts())), _parts_decoder
        )
        at_least = named[0][0]
        held = [parts for _, parts in named]
        loadable, missing = loadable_steps(held, ranks.size)
        for first in loadable:
            if first.step < at_least:
                break
            recovery = self._load_step(ranks, first, held)
            if recovery is not None:
                self._kept.retain_only(first)
                self.resumed = first
                logger.info("resumed step %d from %s; the ranks had kept %s", first.step, recovery.source, _shown(held))
                return recovery
        for each in missing:
            if each.step > at_least:
                logger.warning("kept states of step %d are not used: those of ranks %s are lost", each.step, each.ranks)
        return None

    def _load_step(self, ranks: Agreement, first: KeptPart, held: Sequence[Sequence[KeptPart]]) -> Recovery | None:
        step, num_ranks, own = first.step, first.num_ranks, first.of_rank(ranks.rank)
        owners = owners_of(held, first, ranks.size)
        is_complete = all(first.of_rank(rank) in held[owner] for rank, owner in enumerate(owners))
        outcomes = [] if is_complete else self._complete(ranks, first, owners)
        recovered: list[Recovery] = []
        is_changed = False
        if not any(outcomes) and num_ranks == ranks.size:
            source = _OWN if own in held[ranks.rank] else _PARTNER
            outcomes = self._loaded(ranks, step, recovered, partial(self._load_own, own, source))
            is_changed = "" in outcomes
        is_misfit = _MISFIT in outcomes and set(outcomes) <= {"", _MISFIT}
        if (num_ranks != ranks.size and not any(outcomes)) or (is_misfit and num_ranks > 1):
            # Another number of ranks, or another layout of as many.
            recovered.clear()
            outcomes = self._load_resharded(ranks, first, recovered)
            is_changed = is_changed or "" in outcomes
        if recovered and not any(outcomes):
            return recovered[0]
        # On all ranks alike: some ranks may have loaded what others could not.
        self.has_failed = self.has_failed or is_changed or any(each not in {"", _MISFIT} for each in outcomes)
        if is_changed:
            self._state.mark_partial(step, f"not all ranks could load their kept states: {outcomes}")
        logger.warning("step %d of the kept states is not used: %s", step, outcomes)
        return None

    def _complete(self, ranks: Agreement, first: KeptPart, owners: Sequence[int]) -> list[str]:
        """Let each rank fetch the parts that it is to have and does not hold whole. Return why ranks could not."""
        with ExitStack() as serving:
            offers = self._offers(ranks, first, serving)
            fetch = partial(self._fetch_missing, first, owners, offers, ranks.rank)
            return self._on_all_ranks(ranks, first.step, fetch)

    def _offers(self, ranks: Agreement, first: KeptPart, serving: ExitStack) -> _Offers:
        """Serve the parts of a step that this rank holds. Return the parts and addresses of all ranks."""

        def offer() -> _Offers:
            return [
                each for each in serving.enter_context(self._kept.offering(first.step)) if each[0].is_of_step(first)
            ]

        offered = ranks.values_of_all("serve kept states", offer, _offers_decoder)
        return [each for some in offered for each in some]

    def _fetch_missing(self, first: KeptPart, owners: Sequence[int], offers: _Offers, own_rank: int) -> None:
        addresses = dict(reversed(offers))
        for rank, owner in enumerate(owners):
            part = first.of_rank(rank)
            if owner != own_rank or part in self._kept.parts():
                continue
            holder, twins = addresses.get(part), []
            if holder is None:
                sparse = next((each for each, _ in offers if each.rank == rank), None)
                if sparse is None:
                    raise TransportError(f"expected a copy of the state of rank {rank}, got none", step=first.step)
                holder = addresses[sparse]
                found = (addresses.get(first.of_rank(twin)) for twin in sparse.twins)
                twins = [address for address in found if address is not None][:1]
            timeout = FetchTimeout(total=_LONGEST_FETCH, unreachable=self._state.timeout, progress=self._state.timeout)
            settings = self._transport.fetch_settings(timeout)
            self._kept.copy(part, holder, twins, replace(settings, verify=True, on_progress=None))

    def _load_own(self, part: KeptPart, source: str) -> Recovery:
        with self._kept.serving(part):
            return self._recover(self._transport.metadata(), part.step, source)

    def _load_resharded(self, ranks: Agreement, first: KeptPart, recovered: list[Recovery]) -> list[str]:
        with ExitStack() as serving:
            found = dict(reversed(self._offers(ranks, first, serving)))
            parts = [first.of_rank(rank) for rank in range(first.num_ranks)]
            missing = [part.rank for part in parts if part not in found]
            if missing:
                return [f"the kept states of the ranks {missing} are damaged"]
            addresses, named = [found[part] for part in parts], _OTHER_LAYOUT.format(first.num_ranks)
            load = partial(self._recover, addresses, first.step, named, ranks.rank)
            return self._loaded(ranks, first.step, recovered, load)

    def _recover(self, source: str | list[str], step: int, named: str, rank: int = 0) -> Recovery:
        options = PeerOptions(timeout=self._state.timeout, is_kept=True)
        return self._peers.recover_kept(
            source, step, options, named, partial(self._load_local, step, named), group_rank=rank
        )

    def _load_local(self, step: int, source: str, state: Mapping[str, Any]) -> None:
        own = self._kept.own_part(step)
        self._local.load(state.get(local_key(own.rank, own.num_ranks), {}), step=step, source=source)

    def _loaded(
        self, ranks: Agreement, step: int, recovered: list[Recovery], load: Callable[[], Recovery]
    ) -> list[str]:
        return self._on_all_ranks(ranks, step, lambda: recovered.append(load()))

    def _on_all_ranks(self, ranks: Agreement, step: int, action: Callable[[], None]) -> list[str]:
        """Run an action on every rank, and return for each why it failed; empty where it did not."""

        def outcome() -> str:
            try:
                ranks.showing_life(action, 2 * _LONGEST_FETCH.total_seconds())
            except (ManagerError, TransportError) as error:
                logger.warning("step %d of the kept states cannot be loaded: %s", step, error)
                is_misfit = isinstance(error, (StateMismatchError, RestoreError))
                return _MISFIT if is_misfit else f"{type(error).__name__}: {error}"[:_MAX_SHOWN]
            return ""

        return ranks.values_of_all("load a kept state", outcome, _outcome_decoder)


class _Incomplete(NamedTuple):
    """A step of which the parts of some ranks exist nowhere."""

    step: int
    ranks: list[int]


def loadable_steps(held: Sequence[Sequence[KeptPart]], size: int) -> tuple[list[KeptPart], list[_Incomplete]]:
    """Return rank 0's part of each step of which all parts exist, the newest first; and the other steps.

    Args:
        held: The parts that each rank holds.
        size: Number of ranks now. Of two kinds of parts of one step, those of this number of ranks come first.
    """
    found = {part for parts in held for part in parts}
    loadable, incomplete = [], []
    for first in {part.of_rank(0) for part in found}:
        of_step = [part for part in found if part.is_of_step(first)]
        whole = {part.rank for part in of_step if not part.twins}
        filled = {part.rank for part in of_step if whole.intersection(part.twins)}
        missing = [rank for rank in range(first.num_ranks) if rank not in whole | filled]
        if missing:
            incomplete.append(_Incomplete(first.step, missing))
        else:
            loadable.append(first)
    loadable.sort(key=lambda each: (each.step, each.num_ranks == size, each.num_ranks, each.history), reverse=True)
    return loadable, sorted(incomplete)


def owners_of(held: Sequence[Sequence[KeptPart]], first: KeptPart, size: int) -> list[int]:
    """Return for each part the rank that is to serve it: its own rank, or one that holds it, whole if possible."""
    if first.num_ranks == size:
        return list(range(size))
    holders = [(part, holder) for holder, parts in enumerate(held) for part in parts if part.is_of_step(first)]
    owners = {part.rank: holder for part, holder in reversed(holders)}
    owners.update({part.rank: holder for part, holder in reversed(holders) if not part.twins})
    return [owners[rank] for rank in range(first.num_ranks)]


def _shown(held: Sequence[Sequence[KeptPart]]) -> list[list[str]]:
    return [[f"step {part.step} of rank {part.rank}/{part.num_ranks}" for part in parts] for parts in held]
