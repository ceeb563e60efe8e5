"""Replicas' reports through the Lighthouse, and which of them come from members of the job.

Any client that reaches the Lighthouse can ask for a quorum, under any name and with any step. With a job token each
replica signs its report. Replicas ignore reports without a valid signature: they do not heal from their senders, wait
for them or form process groups with them.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ft_transport.keys import TOKEN_VARIABLE, Keys
from manager.errors import QuorumError
from manager.quorum.reports import Member

logger = logging.getLogger(__name__)

_PURPOSE: Final = "member"
_WARN_EVERY_S: Final = 60.0
_MAX_SHOWN: Final = 3
_MAX_SHOWN_CHARACTERS: Final = 100
_MAX_REMEMBERED: Final = 10_000

_numbers = itertools.count(1)
"""Per process: a later manager of it may reuse the id of an earlier one."""


_encoder: Final = msgspec.json.Encoder(order="deterministic")


class SignedReports:
    """Writes this replica's reports, and reads those of others. For the quorum thread alone.

    Args:
        keys: The keys of the job token; ``None`` without one.
    """

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._last_numbers: dict[str, int] = {}
        self._is_established = False
        self._proved: frozenset[str] = frozenset()
        self._warned_s = -_WARN_EVERY_S

    def data_of(self, member: Member) -> dict[str, Any]:
        """Return a replica's report as plain values, signed if the job has a token."""
        said = msgspec.structs.replace(
            member, process=f"{os.getpid()} on {socket.gethostname()}", number=next(_numbers), signature=""
        )
        if self._keys is not None:
            said = msgspec.structs.replace(said, signature=self._keys.sign(_PURPOSE, _encoder.encode(said)))
        plain: dict[str, Any] = msgspec.to_builtins(said)
        return plain

    def members_of(self, participants: Sequence[Any], own_id: str) -> tuple[Member, ...]:
        """Return the members of a quorum that belong to the job, in the quorum's order.

        Args:
            participants: The Lighthouse's answer.
            own_id: This replica's id.

        Raises:
            QuorumError: A participant does not run this package. Or no other participant of this replica's first quorum
                belongs to the job: this replica may have a wrong token, and must not train alone. Or half of the last
                quorum's members sign with another token now, which would split the job.
        """
        told = [(participant.replica_id, self._member_of(participant)) for participant in participants]
        strangers = [replica_id for replica_id, member in told if member is None]
        members = tuple(member for _, member in told if member is not None)
        if strangers:
            has_company = any(member.replica_id != own_id for member in members)
            self._note(strangers, may_be_wrong=not has_company and not self._is_established)
            self._refuse_to_part(members, participants)
        self._is_established = True
        self._proved = frozenset(member.replica_id for member in members)
        return members

    def _refuse_to_part(self, members: Sequence[Member], participants: Sequence[Any]) -> None:
        """Refuse to continue if at least half of the last quorum's members sign with another token."""
        num_left = sum(member.replica_id in self._proved for member in members)
        parted = [
            each.replica_id for each in participants if each.replica_id in self._proved and self._has_other_token(each)
        ]
        if parted and len(parted) >= num_left:
            raise QuorumError(
                f"expected replicas with the same job token, and {_shown(parted)} of the last quorum sign with another "
                f"one now; a token is replaced by 'old new' everywhere, then 'new old', then 'new' ({TOKEN_VARIABLE})"
            )

    def _has_other_token(self, participant: Any) -> bool:
        """Return whether a participant signs with a key that this replica lacks."""
        try:
            data = _data_of(participant)
        except msgspec.ValidationError:
            return False
        key_id, is_signed, _ = data.signature.partition(":")
        return bool(is_signed) and self._keys is not None and self._keys.with_id(key_id) is None

    def _note(self, strangers: Sequence[str], *, may_be_wrong: bool) -> None:
        shown = _shown(strangers)
        what = f"{len(strangers)} in the quorum do not prove this replica's job token ({TOKEN_VARIABLE}): {shown}"
        if self._keys is None:
            what = f"{len(strangers)} in the quorum have a job token, and this replica has none: {shown}"
        if may_be_wrong:
            raise QuorumError(f"expected replicas with the same job token; {what}")
        if time.monotonic() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            logger.warning("%s; they take no part", what)

    def _member_of(self, participant: Any) -> Member | None:
        replica_id = participant.replica_id
        try:
            data = _data_of(participant)
        except msgspec.ValidationError as error:
            if self._keys is not None:
                return None
            raise QuorumError(
                "expected replicas that run this package in the quorum, and "
                f"{replica_id[:_MAX_SHOWN_CHARACTERS]!r} says of itself {str(participant.data)[:200]!r}: {error}"
            ) from error
        member = msgspec.structs.replace(
            data,
            replica_id=replica_id,
            step=participant.step,
            store_address=participant.store_address,
            signature="",
        )
        return member if self._belongs(member, data.signature) else None

    def _belongs(self, member: Member, signature: str) -> bool:
        if self._keys is None:
            return not signature
        if not self._keys.verifies(signature, _PURPOSE, _encoder.encode(member)):
            return False
        # Refuse replays: another client may repeat an earlier report.
        if member.number < self._last_numbers.get(member.replica_id, 0):
            return False
        if member.replica_id not in self._last_numbers and len(self._last_numbers) >= _MAX_REMEMBERED:
            self._last_numbers.clear()
        self._last_numbers[member.replica_id] = member.number
        return True


def _data_of(participant: Any) -> Member:
    # The Lighthouse's client has already decoded the JSON.
    return msgspec.convert(participant.data, Member)  # noqa: TID251 # safe: ``reports`` has made a decoder


def _shown(replica_ids: Sequence[str]) -> str:
    return ", ".join(repr(each[:_MAX_SHOWN_CHARACTERS]) for each in replica_ids[:_MAX_SHOWN])
