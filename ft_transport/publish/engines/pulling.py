"""An engine that pulls weights over HTTP from the publisher's own transport, without a shared disk.

The publisher sends it the address of a version (``POST /weights/{version}``); the engine's ``WeightReceiver`` fetches
the changes and answers with the version that it then uses. ``GET /weights`` returns the current version. ``pull_order``
defines the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, get_args

from ft_transport.errors import EngineRefusedError, EngineUnreachableError
from ft_transport.keys import TOKEN_VARIABLE, Keys
from ft_transport.publish.engines.engine import Answer, Delivery, EngineConnection, checked_url
from ft_transport.publish.engines.pull_order import MEANING, ROUTE, Order, Outcome, Question, Reason, Status


@dataclass(frozen=True, slots=True)
class PullingEngine:
    """A process with a ``WeightReceiver``.

    Attributes:
        url: Base URL of the receiver.
        headers: Sent with each request, such as the headers that a proxy requires.
        token: The job token; both sides prove that they know it, and never send it. Default: the environment's, as for
            ``TransportSettings``.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    adapter_features: ClassVar = frozenset({"lora_embedding"})
    _keys: Keys | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        object.__setattr__(self, "_keys", Keys.of(self.token) if self.token is not None else Keys.from_environment())

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`."""
        if delivery.address is None:
            raise EngineRefusedError("expected a publisher that serves versions, pass it a transport", peer=self.url)
        address = await delivery.address()
        question = Question.of(self.url)
        status = await self._status(connection, question)
        order = Order(version=delivery.version, address=address, reached=question.reached, challenge=status.challenge)
        with connection.replacing(stays_paused=False):
            try:
                answer = await connection.post(f"{ROUTE}/{delivery.version}", order.body(self._keys))
            except EngineRefusedError as error:
                raise self._refusal(error, order) from error
            outcome = order.accepted(self._keys, answer.json())
            if outcome is None:
                # The receiver may have the version. The next attempt shows it.
                raise EngineUnreachableError(
                    "expected an outcome with a proof of the job token, it was changed on its way", peer=self.url
                )
        if outcome.version is None:
            raise answer.refusal(f"expected version {delivery.version}")
        return outcome.version

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """See `PolledEngine`."""
        del newest
        return (await self._status(connection, Question.of(self.url))).version

    async def _status(self, connection: EngineConnection, question: Question) -> Status:
        try:
            answer = await connection.get(ROUTE, **question.query(self._keys))
        except EngineRefusedError as error:
            raise self._refusal(error, None) from error
        if self._keys is None:
            return Status(version=_version(answer), challenge="")
        status = question.accepted(self._keys, answer.json())
        if status is None:
            text = f"expected the job token: the receiver has not proved that it knows it ({TOKEN_VARIABLE})"
            raise EngineRefusedError(text, status=answer.status, body=text, request=answer.request, peer=self.url)
        return status

    def _refusal(self, error: EngineRefusedError, order: Order | None) -> EngineRefusedError:
        """Replace a receiver's reason by its meaning; return any other error unchanged."""
        try:
            said = json.loads(error.body)
        except (ValueError, RecursionError):
            return error
        outcome = _claimed(said) if order is None else order.accepted(self._keys, said) or _claimed(said)
        if outcome is None or outcome.reason is None:
            return error
        known = f"; it has version {outcome.version}" if outcome.version is not None else ""
        meaning = f"{MEANING[outcome.reason]} ({outcome.reason}{known}); the log of the receiver says more"
        return EngineRefusedError(meaning, status=error.status, body=meaning, request=error.request, peer=self.url)


def _claimed(said: object) -> Outcome | None:
    """Parse a refusal without a proof, such as any refusal before the token was proved."""
    reason: Reason | None = said.get("reason") if isinstance(said, dict) else None
    return Outcome(version=None, reason=reason) if reason in get_args(Reason) else None


def _version(answer: Answer) -> int | None:
    fields = answer.json()
    version = fields.get("version") if isinstance(fields, dict) else None
    return version if isinstance(version, int) else None
