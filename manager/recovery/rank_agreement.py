"""Agreements of all ranks of a replica during a recovery: on one step, and on whether every rank has recovered."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch.distributed as dist

from ft_transport import ConfigurationError, TransportError
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.coordination.votes import Failure, describe, rebuild

if TYPE_CHECKING:
    from ft_transport import HTTPTransport
    from ft_transport.credentials import Keys

T = TypeVar("T")

_MAX_SHOWN_CHARACTERS: Final = 500

_addresses_decoder: Final = msgspec.msgpack.Decoder(list[str])
_step_decoder: Final = msgspec.msgpack.Decoder(tuple[int, Failure | None])


def replica_ranks(keys: Keys | None) -> RankGroup:
    """Return all ranks of this replica: those of ``torch.distributed``. All ranks must call this equally often.

    Raises:
        ConfigurationError: The launcher started several ranks, and ``torch.distributed`` is not initialised.
    """
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks != "1" and not dist.is_initialized():
        raise ConfigurationError(
            f"expected torch.distributed to be initialised: WORLD_SIZE is {num_ranks}, and all ranks of the replica "
            "must agree on a step"
        )
    return RankGroup.of(None, keys=keys)


def agree_on_step(
    ranks: Agreement, transport: HTTPTransport[Any], addresses: Sequence[str], *, timeout: timedelta
) -> int:
    """Request snapshots of one common step from the sources of all ranks, and return the step on every rank.

    Args:
        ranks: All ranks of this replica, which make the same call.
        transport: The transport with which the first rank requests the snapshots.
        addresses: The addresses from which this rank will recover. They may differ between ranks.
        timeout: Deadline of the requests.

    Raises:
        TransportError: A request failed, with the same error on all ranks; or a rank exited.
    """
    named = ranks.values_of_all("name the sources", lambda: list(addresses), _addresses_decoder)

    def ask() -> tuple[int, Failure | None]:
        everywhere = [address for each in named for address in each]
        try:
            return transport.common_step(list(dict.fromkeys(everywhere)), timeout=timeout), None
        except TransportError as error:
            return 0, describe(error)

    step, failure = ranks.value_of_first("agree on a step", ask, _step_decoder)
    if failure is not None:
        raise rebuild(failure)
    return step


def recover_on_all_ranks(ranks: Agreement, recover: Callable[[], T], *, timeout: timedelta) -> tuple[T, list[str]]:
    """Run ``recover`` on every rank. Return its result on this rank, and messages about errors of other ranks.

    Args:
        ranks: All ranks of this replica, which make the same call.
        recover: This rank's recovery.
        timeout: While ``recover`` runs, other ranks wait for at most twice this time.

    Raises:
        Exception: The error of ``recover`` on this rank; the other ranks receive its message.
        RankGoneError: The store does not respond, and ``recover`` did not run.
    """
    outcome: list[T] = []
    own_errors: list[Exception] = []

    def act() -> bytes | None:
        try:
            outcome.append(ranks.showing_life(recover, 2 * timeout.total_seconds()))
        except Exception as error:
            own_errors.append(error)
            return f"{type(error).__name__}: {error}"[:_MAX_SHOWN_CHARACTERS].encode()
        return None

    try:
        messages = ranks.run_on_all_ranks("recover", act)
        failures = [
            f"rank {rank}: {each.decode(errors='replace')}"
            for rank, each in enumerate(messages)
            if each and rank != ranks.rank
        ]
    except TransportError as error:
        if not outcome and not own_errors:
            raise
        failures = [str(error)]
    if own_errors:
        raise own_errors[0]
    return outcome[0], failures
