"""Agreement of a replica's ranks without a quorum: on addresses, and on the one step that all of them receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from ft_transport import TransportError
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.coordination.votes import Failure, describe, rebuild

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

T = TypeVar("T")

_MAX_SHOWN_CHARACTERS: Final = 500


class RecoveringRanks:
    """The ranks of one replica that recover together. All of them make one, and the same calls on it.

    They agree in the key-value store of ``torch.distributed``, in plain values: no message of a rank is unpickled.

    Args:
        group: The ranks.
        timeout: Deadline of each call on a rank, and the longest delay of one rank behind another.
    """

    def __init__(self, group: RankGroup, timeout: timedelta) -> None:
        self.rank = group.rank
        self._timeout_s = timeout.total_seconds()
        self._agreement = Agreement(group, "recover", timeout)

    def agree_on_step(self, transport: HTTPTransport[Any], addresses: Sequence[str], *, timeout: timedelta) -> int:
        """Have all sources take a snapshot of one step, and return the step on every rank.

        Args:
            transport: Makes the requests, on the first rank.
            addresses: Addresses that this rank will recover from; they may differ between ranks.
            timeout: Deadline of the requests.

        Raises:
            TransportError: The request failed, with the same error on all ranks; or a rank exited.
        """
        named = self._agreement.values_of_all("name the sources", lambda: list(addresses), _addresses_decoder)

        def ask() -> _StepReply:
            everywhere = [address for each in named for address in each]
            try:
                step = transport.common_step(list(dict.fromkeys(everywhere)), timeout=timeout)
            except TransportError as error:
                return _StepReply(failure=describe(error))
            return _StepReply(step=step)

        reply = self._agreement.value_of_first("agree on a step", ask, _reply_decoder)
        if reply.failure is not None:
            raise rebuild(reply.failure)
        return reply.step

    def run(self, action: Callable[[], T]) -> tuple[T, list[str]]:
        """Run ``action`` on every rank. Return its result here, and the errors of other ranks.

        Args:
            action: This rank's part. The others wait as long as it runs, for twice the timeout at most.

        Raises:
            Exception: Any error of ``action`` here; the other ranks receive it.
            RankGoneError: The store does not answer, and ``action`` did not run.
        """
        outcome: list[T] = []
        own_errors: list[Exception] = []

        def act() -> bytes | None:
            try:
                outcome.append(self._agreement.showing_life(action, 2 * self._timeout_s))
            except Exception as error:
                own_errors.append(error)
                return f"{type(error).__name__}: {error}"[:_MAX_SHOWN_CHARACTERS].encode()
            return None

        try:
            said = self._agreement.run_on_all_ranks("recover", act)
            failures = [
                f"rank {rank}: {each.decode(errors='replace')}"
                for rank, each in enumerate(said)
                if each and rank != self.rank
            ]
        except TransportError as error:
            if not outcome and not own_errors:
                raise
            failures = [str(error)]
        if own_errors:
            raise own_errors[0]
        return outcome[0], failures


class _StepReply(msgspec.Struct, frozen=True):
    """The first rank's result: a step, or the error."""

    step: int = 0
    failure: Failure | None = None


_addresses_decoder: Final = msgspec.msgpack.Decoder(list[str])
_reply_decoder: Final = msgspec.msgpack.Decoder(_StepReply)
