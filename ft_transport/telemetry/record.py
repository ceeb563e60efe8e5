"""The record of one heal, fetch, save, load or publish: where its time went, whom it had its bytes from, what failed.

A record is written when what it tells of has ended. As JSON it is one object in one line, whose keys are the attributes
below; what reads one ignores keys that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from ft_transport.errors import RecordError
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.telemetry.encoding import encode_told

Kind: TypeAlias = Literal["heal", "fetch", "save", "load", "publish"]
Outcome: TypeAlias = Literal["ok", "failed", "abandoned"]
Role: TypeAlias = Literal["source", "relay", "same_host", "engine", "storage"]

KINDS: Final = get_args(Kind)

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""Others have more digits than a float can be made of, and no counter has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What the recording thread was about, for a while. The phases of a record follow each other without a gap.

    Attributes:
        name: ``quorum``, ``lock``, ``manifest``, ``plan``, ``transfer``, ``verify``, ``load``, ``compare``,
            ``rendezvous``, ``first_step`` for a heal; docs/recoveries.md says what each is. The same name may come
            again.
        start_s: From the beginning of the record, in seconds.
        length_s: In seconds.
    """

    name: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What went between this process and one other place.

    Attributes:
        peer: ``host:port`` of a source or relay as it was told, the URL of an engine, or the path of a file.
        role: What it was to this process.
        num_bytes: That came, or were sent or written.
        length_s: From its first request to the end of its last, in seconds.
        local_address: This end of its connections; empty where there are none.
        peer_address: What the peer's name was resolved to.
        interface: The network interface that has ``local_address``; empty where the system does not tell.
        num_connections: How many were opened.
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
        """Over the whole of ``length_s``; 0 where nothing was measured."""
        return self.num_bytes / self.length_s if self.length_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Something that failed and was tried again, here or elsewhere.

    Attributes:
        at_s: When, from the beginning of the record, in seconds.
        cause: The error, its type before its message.
        peer: With whom; empty if with nobody.
    """

    at_s: float
    cause: str
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """See the module.

    Attributes:
        kind: What it tells of.
        begun_unix_s: When it began, in seconds since 1970.
        length_s: How long it took, by the monotonic clock, in seconds.
        outcome: How it ended; ``abandoned`` where something else took its place.
        replica: How this replica calls itself.
        group_rank: Of this process in its replica.
        step: The step that it ended at; ``None`` where none was reached. A publish has its version here.
        num_bytes: Of the state, checkpoint or version as a whole.
        error: Why it failed; empty if it did not.
        phases: In order, without gaps.
        transfers: By peer.
        retries: In order.
        notes: What else helps to explain it, by name, in plain text.
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


_record_decoder: Final = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """One line of JSON, without its end."""
    return encode_told(record)


def decode_record(line: bytes | str) -> Record:
    """The inverse of `encode_record`.

    Raises:
        RecordError: The line is no record.
    """
    try:
        return _record_decoder.decode(line)
    except DECODE_ERRORS as error:
        raise RecordError(f"expected a record in JSON, got something else: {error}") from error
