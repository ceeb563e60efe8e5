"""Reads the status page of torchft's Lighthouse: the replicas that a quorum waits for, and the running ones.

The page is made for people and differs between versions of torchft; unknown parts are ignored. Any client that reaches
the Lighthouse can choose a name of any characters, even without a job token. So a name is the whole text before the
last age in its line, and messages escape all text of the page.
"""

from __future__ import annotations

import html
import itertools
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ft_transport.errors import escape_peer_text

# No pattern can match the same characters in two ways: otherwise a name of 60,000 spaces would take minutes.
_HEARTBEAT: Final = re.compile(r'<li class="heartbeat([^<>]{0,200})>([^<]*)<')
_AGE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)s ago")
_REASON: Final = re.compile(r"quorum status:([^<\[]+)")
_ASKING: Final = re.compile(r"\[([0-9]{1,9})/[0-9]{1,9} participants")
_MEMBER: Final = re.compile(r"<b>([^<]+)</b>\s*<br/>\s*Step: (-?[0-9]{1,19})\s*<br/>\s*Manager: ([^<]*)<br/>")
_LONGEST_PAGE_BYTES: Final = 1 << 20
_PATIENCE: Final = 5
"""The whole page may take this many times as long as one wait."""
_NUM_NAMED: Final = 10
_MAX_NAME: Final = 100
_MAX_REASON: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldMember:
    """A member of the last quorum, from the page; not authenticated.

    Attributes:
        replica_id: The replica's id.
        step: Its committed step at that time.
        addresses: The address of each rank, which serves its state; older versions give the first one only.
    """

    replica_id: str
    step: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseStatus:
    """The content of the page.

    Attributes:
        reason: The Lighthouse's reason for the lack of a quorum; empty without one.
        num_asking: Number of replicas that have asked for a quorum; ``None`` if the page does not say.
        alive: The replicas with a fresh heartbeat.
        silent: The replicas without a fresh heartbeat, and the age of the last one in seconds.
        members: The members of the last quorum that have a fresh heartbeat.
    """

    reason: str
    num_asking: int | None
    alive: tuple[str, ...]
    silent: tuple[tuple[str, float], ...]
    members: tuple[ToldMember, ...] = ()

    def missing(self, own_id: str) -> str:
        """Describe, as a clause, which replicas ``own_id`` waits for."""
        others = [replica_id for replica_id in self.alive if replica_id != own_id]
        reason = escape_peer_text(self.reason, max_characters=_MAX_REASON)
        clauses = [f"the Lighthouse says '{reason}'"] if reason else []
        if self.num_asking is not None:
            clauses.append(f"{self.num_asking} of {max(len(self.alive), self.num_asking)} live replicas have asked")
        if others and self.num_asking == 1:
            clauses.append(f"alive without asking: {_named(others)}")
        elif others and (self.num_asking is None or self.num_asking <= len(others)):
            clauses.append(f"the others with a heartbeat: {_named(others)}")
        if self.silent:
            seconds = [f" for {age_s:.0f} s" for _, age_s in self.silent]
            clauses.append(f"silent: {_named([replica_id for replica_id, _ in self.silent], seconds)}")
        return "; ".join(clauses)


def read_status(address: str, timeout_s: float) -> LighthouseStatus | None:
    """Read the page of the Lighthouse at ``address``; ``None`` if it does not arrive in time.

    Args:
        address: ``http://host:port``.
        timeout_s: Limit of each wait in seconds.
    """
    parts = urlsplit(address)
    until_s = time.monotonic() + _PATIENCE * timeout_s
    answer = bytearray()
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=timeout_s) as connected:
            # The server closes the connection after an answer to this version (RFC 9112, section 9.3).
            connected.sendall(f"GET /status HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode("ascii", "replace"))
            while len(answer) <= _LONGEST_PAGE_BYTES and (received := connected.recv(1 << 16)):
                answer += received
                if time.monotonic() > until_s:
                    return None
    except (OSError, ValueError):
        return None
    head, _, page = answer.partition(b"\r\n\r\n")
    return parse_status(page.decode(errors="replace")) if head.startswith(b"HTTP/1.") else None


def parse_status(page: str) -> LighthouseStatus:
    """Parse the page."""
    reason, asking = _REASON.search(page), _ASKING.search(page)
    alive: set[str] = set()
    silent: list[tuple[str, float]] = []
    for kind, told in _HEARTBEAT.findall(page):
        name, _, age = told.strip().rpartition(": seen ")
        found = _AGE.fullmatch(age)
        if name and found is not None and "old" in kind:
            silent.append((html.unescape(name), float(found[1])))
        elif name and found is not None:
            alive.add(html.unescape(name))
    members = [
        ToldMember(replica_id=html.unescape(name), step=int(step), addresses=tuple(html.unescape(addresses).split()))
        for name, step, addresses in _MEMBER.findall(page)
    ]
    return LighthouseStatus(
        reason=html.unescape(reason.group(1)).strip() if reason else "",
        num_asking=int(asking.group(1)) if asking else None,
        alive=tuple(sorted(alive)),
        silent=tuple(sorted(silent)),
        members=tuple(member for member in members if member.replica_id in alive),
    )


def _named(names: Sequence[str], details: Sequence[str] = ()) -> str:
    shown = [escape_peer_text(name, max_characters=_MAX_NAME) for name in names[:_NUM_NAMED]]
    told = [name + detail for name, detail in itertools.zip_longest(shown, details[:_NUM_NAMED], fillvalue="")]
    rest = len(names) - _NUM_NAMED
    return ", ".join(told) + (f" and {rest} more" if rest > 0 else "")
