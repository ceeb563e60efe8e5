"""The record of one heal, fetch, save, load or publish: its phases, its peers and its failures.

A record is written when its operation ends. As JSON it is one object on one line, whose keys are the attributes below;
readers ignore unknown keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from ft_transport.errors import RecordError
from ft_transport.runtime.decoding import DECODE_ERRORS

Kind: TypeAlias = Literal["heal", "fetch", "save", "load", "publish"]
Outcome: TypeAlias = Literal["ok", "failed", "abandoned", "running"]
Role: TypeAlias = Literal["source", "relay", "same_host", "engine", "storage"]

KINDS: Final = get_args(Kind)

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""Larger numbers have more digits than a float can represent, and no counter reaches them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of the recording thread. The phases of a record follow each other without gaps.

    Attributes:
        name: ``quorum``, ``lock``, ``manifest``, ``plan``, ``transfer``, ``verify``, ``load``, ``compare``,
            ``rendezvous``, ``first_step`` for a heal; docs/recoveries.md explains each. A name may occur several times.
        start_s: Seconds from the beginning of the record.
        length_s: In seconds.
    """

    name: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The traffic between this process and one other place.

    Attributes:
        peer: ``host:port`` of a source or relay as configured or announced, the URL of an engine, or the path of a
            file.
        role: The peer's role for this process.
        num_bytes: Bytes that were received, sent or written.
        length_s: From its first request to the end of its last, in seconds.
        local_address: This end of its connections; empty without connections.
        peer_address: The address that the peer's name resolved to.
        interface: The network interface that has ``local_address``; empty if the system does not report it.
        num_connections: Number of connections that were opened.
    """

    peer: str
    role: Role
    num_bytes: Number
    length_s: float
    local_address: str = ""
    peer_address: str = ""
    interface: str = ""
    num_connections: Number = 0

    @property
    def bytes_per_s(self) -> float:
        """Average over ``length_s``; 0 if nothing was measured."""
        return self.num_bytes / self.length_s if self.length_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A failure after which the operation was retried, here or elsewhere.

    Attributes:
        at_s: Seconds from the beginning of the record.
        cause: The error, its type before its message.
        peer: The peer that failed; empty if none was involved.
    """

    at_s: float
    cause: str
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of one operation; see the module.

    Attributes:
        kind: The operation.
        begun_unix_s: When it began, in seconds since 1970.
        length_s: Its duration by the monotonic clock, in seconds.
        outcome: How it ended; ``abandoned`` if another operation replaced it, ``running`` if it has not ended.
        replica: Name that this replica gives itself.
        group_rank: Rank of this process in its replica.
        step: The step that it ended at; ``None`` if it reached none. For a publish, the version.
        num_bytes: Size of the whole state, checkpoint or version.
        error: Why it failed; empty if it did not.
        phases: In order, without gaps.
        transfers: By peer.
        retries: In order.
        notes: Other facts that help to explain it, by name, in plain text.
    """

    kind: Kind
    begun_unix_s: float
    length_s: float
    outcome: Outcome
    replica: str = ""
    group_rank: Number = 0
    step: Number | None = None
    num_bytes: Number = 0
    error: str = ""
    phases: tuple[Phase, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    retries: tuple[Retry, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    def phase_lengths(self) -> dict[str, float]:
        """Return the seconds of each phase, summed by name, in the order of first occurrence."""
        lengths: dict[str, float] = {}
        for phase in self.phases:
            lengths[phase.name] = lengths.get(phase.name, 0.0) + phase.length_s
        return lengths


_record_decoder: Final = msgspec.json.Decoder(Record)


def now_unix_s() -> float:
    """Return the clock of this host, in seconds since 1970."""
    return datetime.now(timezone.utc).timestamp()


def encode_json(value: object) -> bytes:
    """Encode a record, or another value that quotes peers and paths, as JSON in one line.

    A header or a path with bytes that are no UTF-8 has lone surrogates (PEP 383), which JSON cannot represent: a
    question mark replaces each of them.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode(errors="replace")))


def decode_record(line: bytes | str) -> Record:
    """Decode the line of a record, as `encode_json` makes it.

    Raises:
        RecordError: The line is no record.
    """
    try:
        return _record_decoder.decode(line)
    except DECODE_ERRORS as error:
        raise RecordError(f"expected a record in JSON, got something else: {error}") from error
