"""Information about the other replicas of the job, from three sources.

- **Reports in a quorum** (`SignedReports`). Any client that reaches the Lighthouse can ask for a quorum, under any name
  and with any step. With a job token, each replica signs its report. Replicas ignore a report without a valid
  signature: they do not heal from its sender, wait for it, or form a process group with it.
- **The status page of torchft's Lighthouse** (`read_status`). The page is made for people and differs between versions
  of torchft, so this module skips what it cannot read. The page is not authenticated. A replica's name may contain any
  characters, even the separator between the name and the age of the last heartbeat. So the age is read from the end of
  the text, and the rest is the name. Messages escape all text from the page.
- **The replicas' own status** (`refusing_members`). A replica cannot leave the Lighthouse: after a first request, the
  Lighthouse waits for it until its heartbeats expire. A newcomer that cannot load the common state, or has other rules,
  would stop all replicas for ``heartbeat_timeout`` at each start. So it first requests the structure and the rules of
  running replicas, and joins only if they match its own. With a job token, both sides of the connection prove the
  token.
"""

from __future__ import annotations

import html
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from ft_transport.credentials import TOKEN_VARIABLE, Keys
from ft_transport.errors import PeerAuthenticationError, TransportError, escape_peer_text
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.telemetry.process_state import ProcessState
from manager.errors import QuorumError
from manager.quorum.decision import DoesNotFit, Rules, decide
from manager.quorum.reports import Member

logger = logging.getLogger(__name__)

AskState: TypeAlias = Callable[[str, timedelta], ProcessState]

NAMELESS: Final = "replica"
"""The name of replicas for which no name is configured."""
_PURPOSE: Final = "member"
_WARN_EVERY_S: Final = 60.0
_MAX_REMEMBERED: Final = 10_000
_MAX_SHOWN: Final = 3
_MAX_SHOWN_CHARACTERS: Final = 100

# No pattern matches the same characters in two ways. Otherwise matching a name of 60,000 spaces could take minutes.
_HEARTBEAT: Final = re.compile(r'<li class="heartbeat([^<>]{0,200})>([^<]*)<')
_AGE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)s ago")
_REASON: Final = re.compile(r"quorum status:([^<\[]+)")
_ASKING: Final = re.compile(r"\[([0-9]{1,9})/[0-9]{1,9} participants")
_MEMBER: Final = re.compile(r"<b>([^<]+)</b>\s*<br/>\s*Step: (-?[0-9]{1,19})\s*<br/>\s*Manager: ([^<]*)<br/>")
_STATUS_S: Final = 0.2
_LONGEST_PAGE_BYTES: Final = 1 << 20
_PATIENCE: Final = 5
"""Reading the whole page may take at most this many times as long as one wait for bytes."""
_MAX_NAMED: Final = 10
_MAX_NAME: Final = 100
_MAX_REASON: Final = 500

_MAX_ASKED: Final = 8
_ANSWERING: Final = timedelta(seconds=1)

_encoder: Final = msgspec.json.Encoder(order="deterministic")
_numbers = itertools.count(time.monotonic_ns())
"""Numbers of reports. A later manager may reuse the id of an earlier one of this process, or of a dead process of this
host, so the numbers continue after those of that manager: they begin with the time since the start of the host.
"""


class SignedReports:
    """Signs this replica's reports, and verifies the reports of other replicas. For the quorum thread only.

    Args:
        keys: The keys of the job token; ``None`` without a token.
    """

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._last_numbers: dict[str, int] = {}
        self._is_established = False
        self._proved: frozenset[str] = frozenset()
        self._warned_s = -_WARN_EVERY_S

    def data_of(self, member: Member) -> dict[str, Any]:
        """Return this replica's report as plain values, signed if the job has a token."""
        report = msgspec.structs.replace(
            member, process=f"{os.getpid()} on {socket.gethostname()}", number=next(_numbers), signature=""
        )
        if self._keys is not None:
            report = msgspec.structs.replace(report, signature=self._keys.sign(_PURPOSE, _encoder.encode(report)))
        plain: dict[str, Any] = msgspec.to_builtins(report)
        return plain

    def members_of(self, participants: Sequence[Any], own_id: str) -> tuple[Member, ...]:
        """Return the reports of the participants that prove the job token, in the order of the quorum.

        Args:
            participants: The participants in the Lighthouse's answer.
            own_id: This replica's id.

        Raises:
            QuorumError: A participant does not run this package. Or no other participant of this replica's first
                quorum proves the job token: the own token may be wrong, and the replica must not train alone. Or at
                least half of the last quorum's members now sign with another token: the job would split.
        """
        reports = [(participant.replica_id, self._member_of(participant)) for participant in participants]
        strangers = [replica_id for replica_id, member in reports if member is None]
        members = tuple(member for _, member in reports if member is not None)
        if strangers:
            is_alone = all(member.replica_id == own_id for member in members)
            self._report_strangers(strangers, may_be_wrong=is_alone and not self._is_established)
            self._refuse_to_split(members, participants)
        self._is_established = True
        self._proved = frozenset(member.replica_id for member in members)
        return members

    def _refuse_to_split(self, members: Sequence[Member], participants: Sequence[Any]) -> None:
        """Raise an error if at least half of the last quorum's members now sign with another token."""
        num_left = sum(member.replica_id in self._proved for member in members)
        changed = [
            each.replica_id for each in participants if each.replica_id in self._proved and self._has_other_token(each)
        ]
        if changed and len(changed) >= num_left:
            raise QuorumError(
                f"expected replicas with the same job token, but {_shown(changed)} of the last quorum now sign with "
                f"another one; to replace a token, set {TOKEN_VARIABLE} everywhere to 'old new', then to 'new old', "
                "then to 'new'"
            )

    def _has_other_token(self, participant: Any) -> bool:
        """Return whether a participant signs its report with a key that this replica does not have."""
        try:
            data = _data_of(participant)
        except msgspec.ValidationError:
            return False
        key_id, is_signed, _ = data.signature.partition(":")
        return bool(is_signed) and self._keys is not None and self._keys.with_id(key_id) is None

    def _report_strangers(self, strangers: Sequence[str], *, may_be_wrong: bool) -> None:
        """Log participants that do not prove the job token; raise an error if this replica's token may be wrong."""
        shown = _shown(strangers)
        what = f"{len(strangers)} participants do not prove this replica's job token ({TOKEN_VARIABLE}): {shown}"
        if self._keys is None:
            what = f"{len(strangers)} participants have a job token, but this replica has none: {shown}"
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
                "expected every replica of the quorum to run this package, but replica "
                f"{replica_id[:_MAX_SHOWN_CHARACTERS]!r} reports {str(participant.data)[:200]!r}: {error}"
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
        # Refuse a replay: another client may send a copy of an earlier report.
        if member.number < self._last_numbers.get(member.replica_id, 0):
            return False
        if member.replica_id not in self._last_numbers and len(self._last_numbers) >= _MAX_REMEMBERED:
            self._last_numbers.clear()
        self._last_numbers[member.replica_id] = member.number
        return True


def _data_of(participant: Any) -> Member:
    # The JSON is decoded already, by the Lighthouse's client.
    return msgspec.convert(participant.data, Member)  # noqa: TID251 # safe: ``reports`` has made a decoder


def _shown(replica_ids: Sequence[str]) -> str:
    return ", ".join(repr(each[:_MAX_SHOWN_CHARACTERS]) for each in replica_ids[:_MAX_SHOWN])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMember:
    """A member of the last quorum, as the Lighthouse's status page shows it; not authenticated.

    Attributes:
        replica_id: The replica's id.
        step: The committed step that the replica reported in that quorum.
        addresses: The addresses at which its ranks serve their state, by rank. Older versions of this package report
            only the address of rank 0.
    """

    replica_id: str
    step: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseStatus:
    """The content of the Lighthouse's status page.

    Attributes:
        reason: Why the Lighthouse has formed no quorum yet; empty if the page gives no reason.
        num_asking: Number of replicas that have asked for a quorum; ``None`` if the page does not show it.
        alive: The ids of replicas whose last heartbeat is recent.
        silent: The ids of replicas without a recent heartbeat, each with the age of its last heartbeat in seconds. Also
            replicas that are dead or have left, in whose place a keeper asks (``stand_in``).
        members: The members of the last quorum whose last heartbeat is recent.
    """

    reason: str
    num_asking: int | None
    alive: tuple[str, ...]
    silent: tuple[tuple[str, float], ...]
    members: tuple[RunningMember, ...] = ()

    def missing(self, own_id: str) -> str:
        """Describe, for a message, which replicas the quorum waits for.

        Args:
            own_id: The id of the replica that waits.
        """
        others = [replica_id for replica_id in self.alive if replica_id != own_id]
        reason = escape_peer_text(self.reason, max_characters=_MAX_REASON)
        clauses = [f"the Lighthouse reports '{reason}'"] if reason else []
        if self.num_asking is not None:
            clauses.append(f"{self.num_asking} of {max(len(self.alive), self.num_asking)} live replicas have asked")
        if others and self.num_asking == 1:
            clauses.append(f"alive without asking: {_named(others)}")
        elif others and (self.num_asking is None or self.num_asking <= len(others)):
            clauses.append(f"the other live replicas: {_named(others)}")
        if self.silent:
            seconds = [f" for {age_s:.0f} s" for _, age_s in self.silent]
            clauses.append(f"without heartbeats: {_named([replica_id for replica_id, _ in self.silent], seconds)}")
        return "; ".join(clauses)


def read_status(address: str, timeout_s: float = _STATUS_S) -> LighthouseStatus | None:
    """Read the status page of a Lighthouse; return ``None`` if it does not arrive in time.

    Args:
        address: ``http://host:port`` of the Lighthouse.
        timeout_s: Limit of each wait for bytes, in seconds.
    """
    parts = urlsplit(address)
    until_s = time.monotonic() + _PATIENCE * timeout_s
    answer = bytearray()
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=timeout_s) as connected:
            # HTTP/1.0, so that the server closes the connection after its response (RFC 9112, section 9.3).
            connected.sendall(f"GET /status HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode("ascii", "replace"))
            while len(answer) <= _LONGEST_PAGE_BYTES and (received := connected.recv(1 << 16)):
                answer += received
                if time.monotonic() > until_s:
                    return None
    except (OSError, ValueError):
        return None
    head, _, page = answer.partition(b"\r\n\r\n")
    return parse_status(page.decode(errors="replace")) if head.startswith(b"HTTP/1.") else None


def running_members(address: str, name: str) -> tuple[RunningMember, ...]:
    """Return the replicas that train, as a Lighthouse's status page shows them; empty if the page is unreadable.

    The page is not authenticated.

    Args:
        address: ``http://host:port`` of the Lighthouse.
        name: The configured name of this replica. Members with this name are its earlier starts, and are left out.
    """
    status = read_status(address)
    members = status.members if status is not None else ()
    own = name if name != NAMELESS else ""
    return tuple(each for each in members if each.step > 0 and not (own and name_of(each.replica_id) == own))


def name_of(replica_id: str) -> str:
    """Return the configured name in a replica's id, which a restart keeps; without a name, return the whole id."""
    name, _, start = replica_id.rpartition(":")
    return replica_id if name in ("", NAMELESS) or not start else name


def parse_status(page: str) -> LighthouseStatus:
    """Parse the HTML of the Lighthouse's status page."""
    reason, asking = _REASON.search(page), _ASKING.search(page)
    members = [
        RunningMember(replica_id=html.unescape(name), step=int(step), addresses=tuple(html.unescape(addresses).split()))
        for name, step, addresses in _MEMBER.findall(page)
    ]
    # A keeper that asks in the place of a replica reports no address.
    absent = {member.replica_id for member in members if not member.addresses}
    alive: set[str] = set()
    silent: list[tuple[str, float]] = []
    for kind, text in _HEARTBEAT.findall(page):
        name, _, age = text.strip().rpartition(": seen ")
        replica_id, found = html.unescape(name), _AGE.fullmatch(age)
        if name and found is not None and ("old" in kind or replica_id in absent):
            silent.append((replica_id, float(found[1])))
        elif name and found is not None:
            alive.add(replica_id)
    return LighthouseStatus(
        reason=html.unescape(reason.group(1)).strip() if reason else "",
        num_asking=int(asking.group(1)) if asking else None,
        alive=tuple(sorted(alive)),
        silent=tuple(sorted(silent)),
        members=tuple(member for member in members if member.replica_id in alive),
    )


def _named(names: Sequence[str], details: Sequence[str] = ()) -> str:
    shown = [escape_peer_text(name, max_characters=_MAX_NAME) for name in names[:_MAX_NAMED]]
    texts = [name + detail for name, detail in itertools.zip_longest(shown, details[:_MAX_NAMED], fillvalue="")]
    rest = len(names) - _MAX_NAMED
    return ", ".join(texts) + (f" and {rest} more" if rest > 0 else "")


def refusing_members(
    own: Member, running: Sequence[RunningMember], rules: Rules, ask: AskState, *, has_token: bool
) -> tuple[Member, ...]:
    """Check, before a newcomer's first quorum, whether the running replicas would refuse it.

    The check takes at most about a second. It ignores replicas that do not answer; the real quorum decides about them.

    Args:
        own: This replica's report.
        running: The running replicas, from the Lighthouse's status page.
        rules: This replica's rules.
        ask: Requests the status of the replica at an address.
        has_token: Whether this replica has a job token.

    Returns:
        The reports of the running replicas and of this one, if they would refuse this one; empty if it may join.

    Raises:
        QuorumError: The replicas' rules differ, or all replicas refuse the connection because this one has no token.
    """
    # Only replicas that are ahead: in a quorum with them, this replica's structure cannot become the common one.
    ahead = sorted((each for each in running if each.step > own.step and each.addresses), key=lambda each: -each.step)
    if not ahead:
        return ()
    asked = ahead[:_MAX_ASKED]
    with SafeExecutor(len(asked), "ft-transport-members") as pool:
        answers = list(pool.map(lambda each: _answer_of(each, ask), asked))
    # A replica with a token goes on: the addresses on the page may be forged, and the quorum shows the real members.
    is_stranger = not has_token and all(isinstance(answer, PeerAuthenticationError) for answer in answers)
    if is_stranger and len(asked) == len(ahead):
        shown = _shown([each.replica_id for each in asked])
        raise QuorumError(
            "expected replicas with the same job token and certificates; this replica has no token "
            f"({TOKEN_VARIABLE}), and the running replicas refuse it: {shown}: {answers[0]}"
        )
    members = (*(answer for answer in answers if isinstance(answer, Member)), own)
    if len(members) == 1:
        return ()
    is_refused = isinstance(decide(members, own.replica_id, rules).role, DoesNotFit)
    return members if is_refused else ()


def _answer_of(named: RunningMember, ask: AskState) -> Member | Exception | None:
    """Request the status of a running replica.

    Returns:
        The replica's report; the error of the request; or ``None`` if the answer does not come from that replica.
    """
    try:
        status = ask(named.addresses[0], _ANSWERING).manager
    except (TransportError, OSError) as error:
        logger.debug("replica %s does not send its status: %s", named.replica_id, error)
        return error
    if status is None or status.replica_id != named.replica_id or not status.rules:
        return None
    return Member(
        replica_id=named.replica_id,
        step=named.step,
        lineage="",
        store_address=status.store_address,
        addresses=named.addresses,
        rules=status.rules,
        structure=status.structure,
    )
