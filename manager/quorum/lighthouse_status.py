"""What the status page of torchft's Lighthouse says of those that a quorum waits for, and of those that train.

The page is made for people and differs between versions of torchft: what cannot be found in it is left out.
"""

from __future__ import annotations

import html
import http.client
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

_HEARTBEAT: Final = re.compile(r'<li class="heartbeat\s*(old)?[^>]*>\s*(.+?): seen ([\d.]+)s ago')
_REASON: Final = re.compile(r"quorum status:\s*([^<\[]+)")
_ASKING: Final = re.compile(r"\[(\d+)/\d+ participants")
_MEMBER: Final = re.compile(r"<b>([^<]+)</b>\s*<br/>\s*Step: (-?\d+)\s*<br/>\s*Manager: ([^<]*?)\s*<br/>")
_LONGEST_PAGE_BYTES: Final = 1 << 20
_NUM_NAMED: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldMember:
    """A member of the last quorum, as the page tells it. Nobody has proved any of it.

    Attributes:
        replica_id: Its id.
        step: The committed step that it held then.
        addresses: Where each of its ranks serves its state; the first alone, where it runs an older version.
    """

    replica_id: str
    step: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseStatus:
    """What the page says.

    Attributes:
        reason: Why there is no quorum, in the words of the Lighthouse; empty if it says nothing.
        num_asking: How many replicas have asked for a quorum; ``None`` if it says nothing.
        alive: The replicas with a fresh heartbeat.
        silent: The replicas without one, and for how many seconds.
        members: The members of the last quorum that have a fresh heartbeat.
    """

    reason: str
    num_asking: int | None
    alive: tuple[str, ...]
    silent: tuple[tuple[str, float], ...]
    members: tuple[ToldMember, ...] = ()

    def missing(self, own_id: str) -> str:
        """Say whom the replica ``own_id`` waits for, as a clause."""
        others = [replica_id for replica_id in self.alive if replica_id != own_id]
        clauses = [f"the Lighthouse says {self.reason!r}"] if self.reason else []
        if self.num_asking is not None:
            clauses.append(f"{self.num_asking} of {max(len(self.alive), self.num_asking)} live replicas have asked")
        if others and self.num_asking == 1:
            clauses.append(f"alive without asking: {_named(others)}")
        elif others and (self.num_asking is None or self.num_asking <= len(others)):
            clauses.append(f"the others with a heartbeat: {_named(others)}")
        if self.silent:
            silent = [f"{replica_id} for {seconds:.0f} s" for replica_id, seconds in self.silent]
            clauses.append(f"silent: {_named(silent)}")
        return "; ".join(clauses)


def read_status(address: str, timeout_s: float) -> LighthouseStatus | None:
    """Read the page of the Lighthouse at ``address``; ``None`` if there is none."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/status")
        page = connection.getresponse().read(_LONGEST_PAGE_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return parse_status(page)


def parse_status(page: str) -> LighthouseStatus:
    """Find what the page says."""
    reason, asking = _REASON.search(page), _ASKING.search(page)
    heartbeats = [(bool(old), html.unescape(name), float(age)) for old, name, age in _HEARTBEAT.findall(page)]
    alive = {name for is_old, name, _ in heartbeats if not is_old}
    members = [
        ToldMember(replica_id=html.unescape(name), step=int(step), addresses=tuple(html.unescape(addresses).split()))
        for name, step, addresses in _MEMBER.findall(page)
    ]
    return LighthouseStatus(
        reason=html.unescape(reason.group(1)).strip() if reason else "",
        num_asking=int(asking.group(1)) if asking else None,
        alive=tuple(sorted(alive)),
        silent=tuple(sorted((name, age) for is_old, name, age in heartbeats if is_old)),
        members=tuple(member for member in members if member.replica_id in alive),
    )


def _named(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
