"""Every error that leaves this package, one tree.

TransportError
├── ConfigurationError          a setting that cannot work, found at construction
├── RecordError                 a line that describes no recovery, save or publish
├── ManifestError               a description of a snapshot that is malformed, too new or over a limit
├── SnapshotError               a state that cannot be captured
│   ├── UnsupportedLeafError    a leaf with no safe encoding, named by its path
│   ├── CollectiveRefusedError  a state function that other ranks would have to take part in
│   ├── StateMovedError         tensors changed in place between the step boundary and their copy
│   └── SnapshotLimitError      as many snapshots alive as are allowed, and each one still read
├── RestoreError                a received tensor or leaf that does not fit its destination
├── IntegrityError              bytes that differ from their digest
├── PeerError                   one peer did not answer a request as expected
│   ├── PeerUnreachableError    no connection, or it broke
│   │   ├── PeerSilentError     nothing comes from it, or too little
│   │   └── UnknownHostError    the peer's host name does not resolve
│   ├── PeerProtocolError       an answer outside the protocol
│   │   └── MessageDamagedError a request, or the head of its answer, was damaged on its way
│   ├── PeerAuthenticationError the job token or a certificate is missing or wrong
│   ├── PeerNotReadyError       the peer has no snapshot yet
│   ├── StateNotServedError     the peer cannot capture its state; asking again does not help
│   ├── StepNotServedError      the peer serves other steps
│   └── SnapshotReplacedError   the snapshot that a fetch was bound to has ended
├── FetchFailedError            every source failed; carries each failure
├── FileWriteError              the file that a snapshot is received into cannot be written
├── CheckpointError             a durable checkpoint could not be written or read
│   ├── CheckpointNotFoundError no complete checkpoint of that step
│   ├── CheckpointExistsError   one is there already
│   ├── CheckpointDamagedError  files that differ from what was written, named
│   ├── CheckpointUntrustedError files that the job token has not signed
│   ├── CheckpointInUseError    another group saves to this place
│   ├── ReplicasDivergedError   ranks that have to hold the same do not
│   ├── RankFailedError         one rank failed; raised alike on all of them
│   ├── RankGoneError           a rank did not answer in time (also a TimeoutError)
│   ├── SaveInProgressError     the save before is not finished
│   └── WriterFailedError       a writer process died, or could not be started
├── PublishError                a version could not be published, or not to enough engines; carries the report
│   ├── StaleVersionError       it is not newer than a published version
│   ├── EngineRefusedError      an engine answered with an error, or uses another version
│   └── EngineUnreachableError  no connection to an engine, or it broke
└── DeadlineExceededError       a wait ran out (also a TimeoutError)

``retryable`` says whether the same request may succeed later or elsewhere; then a fetch (``wire/fetch.py``) or a save
(``coordination/votes.py``) repeats it. The server answers with ``http_status`` if the error is the cause.
``destination_touched`` says that bytes had landed in the receiver's own tensors, and that a pattern that reads as NaN
overwrote them; ``destination_kept`` says that the bytes are still there, for another fetch to complete
(`PartialState`). All errors pickle, so they can cross a process boundary.
"""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

_MAX_WHERE_CHARACTERS: Final = 1000


def escape_peer_text(text: str, *, max_characters: int) -> str:
    """Return a peer's text in a form for messages and logs: one line that cannot move or hide other text.

    Control characters, line ends, bidirectional and other invisible marks, and lone surrogates become escapes as in a
    Python string. Longer text is truncated.
    """
    if len(text) <= max_characters and text.isprintable():
        return text
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:max_characters]
    )
    return shown[:max_characters] + "…" if max(len(text), len(shown)) > max_characters else shown


def escape_controls(text: str) -> str:
    """Return a whole message with the escapes of `escape_peer_text`, of any length and with its line ends."""
    if text.isprintable():
        return text
    return "\n".join(escape_peer_text(line, max_characters=sys.maxsize) for line in text.split("\n"))


def _rebuild(cls: type[TransportError], fields: dict[str, Any]) -> TransportError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error


@dataclass(eq=False, repr=False)
class TransportError(Exception):
    """Root of the tree.

    Attributes:
        message: The expectation, and the actual value.
        peer: ``host:port`` of the peer, if any.
        step: The training step, if any.
        path: The path in the nested state, or the tensor's name, if any.
    """

    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    destination_touched = False  # without a type, which would make it an argument
    destination_kept = False

    message: str
    _: KW_ONLY
    peer: str | None = None
    step: int | str | None = None
    path: str | None = None

    def __str__(self) -> str:
        where = [
            f"{name} {escape_peer_text(str(value), max_characters=_MAX_WHERE_CHARACTERS)}"
            for name, value in (("at", self.path), ("peer", self.peer), ("step", self.step))
            if value is not None
        ]
        # A message may quote a peer, an engine or a file, and ends in a terminal.
        message = escape_controls(self.message)
        text = f"{message} ({', '.join(where)})" if where else message
        if self.destination_kept:
            text += "; the receiver's own tensors hold part of the state"
        elif self.destination_touched:
            text += "; the receiver's own tensors held part of the state and were overwritten with NaN patterns"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), dict(self.__dict__)))


class ConfigurationError(TransportError, ValueError):
    """An invalid setting: an unknown interface, a negative limit, an unusable address."""

    http_status = 400


class RecordError(TransportError, ValueError):
    """A line of a file of records is invalid or of an unknown kind."""


class ManifestError(TransportError, ValueError):
    """A manifest that is malformed, of a newer format, or larger than the limit."""

    http_status = 502


class SnapshotError(TransportError):
    """The state could not be captured; nothing was published and the lock was released."""


class UnsupportedLeafError(SnapshotError, TypeError):
    """A leaf has no safe encoding. ``path`` names it; ``register_encoding`` can give its type one."""


class CollectiveRefusedError(SnapshotError):
    """A state function runs a collective, and would wait for the other ranks, which do not call it."""


class StateMovedError(SnapshotError):
    """Tensors changed in place after the step boundary, outside of an optimizer's step; nothing was published."""

    retryable = True
    http_status = 503


class SnapshotLimitError(SnapshotError):
    """The limit on concurrent snapshots is reached, and every one of them has a reader."""

    retryable = True
    http_status = 503


class RestoreError(TransportError):
    """A received tensor or leaf does not fit its destination; ``path`` names it."""


@dataclass(eq=False, repr=False, kw_only=True)
class IntegrityError(TransportError):
    """Bytes differ from their digest.

    Args:
        message: The verified object.
        chunk: Index of the chunk; ``None`` for the manifest itself.
        expected: Digest in the manifest.
        actual: Digest of the received bytes.
    """

    retryable = True

    chunk: int | None
    expected: int
    actual: int

    def __post_init__(self) -> None:
        self.message += f": expected digest {self.expected:016x}, the bytes that came have {self.actual:016x}"


class PeerError(TransportError):
    """A peer did not answer a request as expected."""


class PeerUnreachableError(PeerError, ConnectionError):
    """The connection to the peer failed or broke."""

    retryable = True


class PeerSilentError(PeerUnreachableError):
    """The peer sent nothing for longer than the stall timeout, or less than the minimum throughput."""


class UnknownHostError(PeerUnreachableError):
    """The peer's host name does not resolve."""

    retryable = False


class PeerProtocolError(PeerError):
    """The peer answered outside the protocol (wrong status, length, range or header)."""


@dataclass(eq=False, repr=False, kw_only=True)
class MessageDamagedError(PeerProtocolError):
    """The request or the answer was damaged on the way: another attempt may help.

    ``refusal`` is the meaning of the answer if it was not damaged: a server of another kind does not confirm what it
    has understood.
    """

    retryable = True

    refusal: TransportError | None = None


class PeerAuthenticationError(PeerError):
    """The peer lacks a valid proof of the job token or a valid certificate, or this process lacks one for the peer."""

    http_status = 401


@dataclass(eq=False, repr=False, kw_only=True)
class PeerNotReadyError(PeerError):
    """The peer has not taken a snapshot yet, or none since the request.

    ``retry_after_s`` is the peer's estimate in seconds; ``after`` is repeated in the next request (``wire.routes``).
    """

    retryable = True
    http_status = 503

    retry_after_s: float = 1.0
    after: int | None = None


class StateNotServedError(PeerError):
    """The peer cannot capture its state: a leaf has no encoding, or a state function fails. Retries are useless."""

    http_status = 501


@dataclass(eq=False, repr=False, kw_only=True)
class StepNotServedError(PeerError):
    """The peer serves other steps than the requested one; ``served`` lists them.

    ``is_past`` means that the peer has passed that step without a snapshot of it.
    """

    http_status = 404

    served: tuple[int, ...] = ()
    is_past: bool = False


class SnapshotReplacedError(PeerError):
    """The fetch's snapshot is no longer served; start again with the present one."""

    retryable = True
    http_status = 409


@dataclass(eq=False, repr=False, kw_only=True)
class FetchFailedError(TransportError):
    """No source could deliver the whole snapshot.

    ``failures`` has the errors in order.
    """

    failures: tuple[TransportError, ...]

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  failure {number}: {failure}" for number, failure in enumerate(self.failures, 1)]
        return "\n".join(lines)


class FileWriteError(TransportError):
    """The file for a received snapshot cannot be written or renamed; ``path`` is its path."""


class CheckpointError(TransportError):
    """A durable checkpoint could not be written or read. ``rank`` is the group rank of the failure, if any."""

    rank: int | None = None


class CheckpointNotFoundError(CheckpointError, LookupError):
    """No complete checkpoint of that step exists, or none at all."""


class CheckpointExistsError(CheckpointError):
    """A checkpoint of that step exists, and must not be replaced."""


@dataclass(eq=False, repr=False, kw_only=True)
class CheckpointDamagedError(CheckpointError):
    """Files differ from their written content; ``files`` names them with the differences."""

    files: tuple[str, ...] = ()


class CheckpointUntrustedError(CheckpointError):
    """A checkpoint is not signed with the job token, or was signed for another job; it is not loaded."""


class CheckpointInUseError(CheckpointError):
    """Another group of ranks saves to this directory; two would mix their values silently."""


class ReplicasDivergedError(CheckpointError):
    """Ranks that must have equal values differ; ``path`` names the first difference."""


@dataclass(eq=False, repr=False, kw_only=True)
class RankFailedError(CheckpointError):
    """One rank failed in a common phase; the same error on every rank.

    ``rank`` is the failed rank, ``cause_type`` the name of the exception's class there, ``errno`` its number, if any,
    and ``phase`` the common phase.
    """

    rank: int
    phase: str
    cause_type: str
    errno: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RankGoneError(CheckpointError, TimeoutError):
    """Ranks did not answer before the deadline; ``ranks`` lists them."""

    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.rank = self.ranks[0] if self.ranks else None


class SaveInProgressError(CheckpointError):
    """The previous save is not finished, and the policy is not to wait for it."""

    retryable = True


class WriterFailedError(CheckpointError):
    """A writer process died, hangs, or could not start. Another one replaces it."""

    retryable = True


class PublishError(TransportError):
    """A version could not be published; ``report`` has the result of each engine, if they were notified."""

    report: Any = None


class StaleVersionError(PublishError):
    """The version is not newer than a published one; versions must increase."""


@dataclass(eq=False, repr=False, kw_only=True)
class EngineRefusedError(PublishError):
    """An engine answered with an error, or uses another version than requested.

    ``request`` is the method and URL, ``status`` and ``body`` are those of the answer, whatever its type. The body is
    as the engine sent it; in the message, and in reports, its control characters are escaped.
    """

    status: int | None = None
    body: str = ""
    request: str = ""


class EngineUnreachableError(PublishError):
    """No connection to an engine, or it broke before the answer was complete; it is tried again."""

    retryable = True


class DeadlineExceededError(TransportError, TimeoutError):
    """A wait ran out. The message names the awaited event, the time and the progress."""
