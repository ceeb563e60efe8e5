"""The exceptions that this package raises, as one tree. The mark ↻ means ``retryable``.

TransportError
├── ConfigurationError          a setting is invalid; raised at construction
├── RecordError                 a line of a records file is not a valid record
├── ManifestError               the manifest of a snapshot is malformed, of a newer format, or larger than a limit
├── SnapshotError               the state could not be captured
│   ├── UnsupportedLeafError    a leaf has no safe encoding; ``path`` names it
│   ├── CollectiveRefusedError  a state function runs a collective, which the other ranks do not call
│   ├── StateMovedError ↻       tensors changed in place between the step boundary and their copy
│   └── SnapshotLimitError ↻    the limit on snapshots is reached, and each of them still has a reader
├── RestoreError                a received tensor or leaf does not fit its destination
├── IntegrityError ↻            bytes differ from their digest
├── PeerError                   one peer did not answer a request as expected
│   ├── PeerUnreachableError ↻  the connection failed or broke
│   │   ├── PeerSilentError ↻   the peer sent nothing, or less than the minimum throughput
│   │   └── UnknownHostError    the peer's host name does not resolve
│   ├── PeerProtocolError       the peer's response violates the protocol
│   │   └── MessageDamagedError ↻ the request, or the head of its response, was damaged on the way
│   ├── PeerAuthenticationError the job token or a certificate is missing or wrong
│   ├── PeerNotReadyError ↻     the peer has no snapshot yet
│   ├── StateNotServedError     the peer cannot capture its state
│   ├── StepNotServedError      the peer serves other steps
│   └── SnapshotReplacedError ↻ the peer no longer serves the snapshot of this fetch
├── FetchFailedError            every source failed; carries each failure
├── FileWriteError              the file for a received snapshot cannot be written
├── CheckpointError             a durable checkpoint could not be written or read
│   ├── CheckpointNotFoundError no complete checkpoint of that step exists
│   ├── CheckpointExistsError   a checkpoint of that step exists already
│   ├── CheckpointDamagedError  files differ from what was written; carries their names
│   ├── CheckpointUntrustedError the checkpoint is not signed with the job token
│   ├── CheckpointInUseError    another group of ranks saves to this directory
│   ├── ReplicasDivergedError   ranks that must have equal values differ
│   ├── RankFailedError         one rank failed; every rank raises this error
│   ├── RankGoneError           a rank did not answer in time (also a TimeoutError)
│   ├── SaveInProgressError ↻   the previous save is not finished
│   └── WriterFailedError ↻     a writer process died, or could not be started
├── PublishError                a version could not be published, or not to enough engines; carries the report
│   ├── StaleVersionError       the version is not newer than a published one
│   ├── EngineRefusedError      an engine responded with an error, or uses another version
│   └── EngineUnreachableError ↻ the connection to an engine failed or broke
└── DeadlineExceededError       a wait timed out (also a TimeoutError)

``retryable``: The same request may succeed later or elsewhere. A fetch (``wire/fetch.py``) then repeats the request. A
save makes up to three attempts if every failed rank has a retryable error, or an ``OSError`` whose number is one of
``RETRYABLE_ERRNOS`` (``coordination/votes.py``); `SaveJob.run` lists the errors that a retry can cure.

``http_status``: Status of the server's response if the server raises the error.

``destination_touched``: The fetch wrote bytes into the receiver's own tensors, and then overwrote them with a pattern
that reads as NaN. ``destination_kept``: The fetch wrote bytes into these tensors, and left them for another fetch to
complete (`PartialState`). All errors can be pickled, so they can cross a process boundary.
"""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

_MAX_WHERE_CHARACTERS: Final = 1000


def escape_peer_text(text: str, *, max_characters: int) -> str:
    """Return a peer's text as one line that is safe in messages and logs: it cannot move or hide other text.

    Replaces control characters, line ends, bidirectional and other invisible marks, and lone surrogates by escapes as
    in a Python string. Truncates text of more than ``max_characters``.
    """
    if len(text) <= max_characters and text.isprintable():
        return text
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:max_characters]
    )
    return shown[:max_characters] + "…" if max(len(text), len(shown)) > max_characters else shown


def escape_controls(text: str) -> str:
    """Escape a message like `escape_peer_text`, but keep its line ends and its full length."""
    if text.isprintable():
        return text
    return "\n".join(escape_peer_text(line, max_characters=sys.maxsize) for line in text.split("\n"))


def _rebuild(cls: type[TransportError], fields: dict[str, Any]) -> TransportError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error


@dataclass(eq=False, repr=False)
class TransportError(Exception):
    """Base class of all errors of this package.

    Attributes:
        message: The expected and the actual value or behavior.
        peer: ``host:port`` of the peer that the error is about, if any.
        step: The training step that the error is about, if any.
        path: The path in the nested state, or the name of the tensor, that the error is about, if any.
    """

    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    destination_touched = False  # has no type, because a type would make it a field
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
        # The message may quote a peer, an engine or a file, and may be printed to a terminal.
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
    """A setting is invalid: an unknown network interface, a negative limit, an address that cannot be used."""

    http_status = 400


class RecordError(TransportError, ValueError):
    """A line of a records file is malformed, or describes an unknown kind of operation."""


class ManifestError(TransportError, ValueError):
    """The manifest of a snapshot is malformed, of a newer format, or larger than the limit."""

    http_status = 502


class SnapshotError(TransportError):
    """The state could not be captured. No snapshot was published, and the lock was released."""


class UnsupportedLeafError(SnapshotError, TypeError):
    """A leaf has no safe encoding. ``path`` names the leaf; `register_encoding` can add an encoding for its type."""


class CollectiveRefusedError(SnapshotError):
    """A state function runs a collective. It would wait forever, because the other ranks do not run it."""


class StateMovedError(SnapshotError):
    """Tensors changed in place after the step boundary, outside of an optimizer's step. No snapshot was published."""

    retryable = True
    http_status = 503


class SnapshotLimitError(SnapshotError):
    """The limit on concurrent snapshots is reached, and every snapshot still has a reader."""

    retryable = True
    http_status = 503


class RestoreError(TransportError):
    """A received tensor or leaf does not fit its destination; ``path`` names the tensor or leaf."""


@dataclass(eq=False, repr=False, kw_only=True)
class IntegrityError(TransportError):
    """Bytes differ from their digest.

    Args:
        message: Beginning of the message, which names the damaged object.
        chunk: Index of the damaged chunk; ``None`` if the manifest itself is damaged.
        expected: Digest according to the manifest.
        actual: Digest of the received bytes.
    """

    retryable = True

    chunk: int | None
    expected: int
    actual: int

    def __post_init__(self) -> None:
        self.message += f": expected digest {self.expected:016x}, but the received bytes have {self.actual:016x}"


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
    """The peer's response violates the protocol: its status, length, range or a header is wrong."""


@dataclass(eq=False, repr=False, kw_only=True)
class MessageDamagedError(PeerProtocolError):
    """The request or the response was damaged on the way; another attempt may succeed.

    ``refusal``: The error that the response reports. If every attempt ends like this, this error is raised instead.
    """

    retryable = True

    refusal: TransportError | None = None


class PeerAuthenticationError(PeerError):
    """The peer or this process does not prove the job token, or has no certificate that the other one accepts."""

    http_status = 401


@dataclass(eq=False, repr=False, kw_only=True)
class PeerNotReadyError(PeerError):
    """The peer has no snapshot yet, or none that is newer than the request.

    ``retry_after_s``: Seconds to wait before the next request, as the peer estimates. ``after``: Number that the next
    request repeats, so that the peer recognizes a snapshot taken since the first request (``wire.routes``).
    """

    retryable = True
    http_status = 503

    retry_after_s: float = 1.0
    after: int | None = None


class StateNotServedError(PeerError):
    """The peer cannot capture its state: a leaf has no encoding, or a state function fails. A retry does not help."""

    http_status = 501


@dataclass(eq=False, repr=False, kw_only=True)
class StepNotServedError(PeerError):
    """The peer does not serve the requested step. ``served``: The steps that the peer serves.

    ``is_past``: Whether the peer's training has passed the requested step without a snapshot of it.
    """

    http_status = 404

    served: tuple[int, ...] = ()
    is_past: bool = False


class SnapshotReplacedError(PeerError):
    """The peer no longer serves the snapshot that this fetch began with; start again with the current one."""

    retryable = True
    http_status = 409


@dataclass(eq=False, repr=False, kw_only=True)
class FetchFailedError(TransportError):
    """No source could deliver the whole snapshot. ``failures``: The errors of the sources, oldest first."""

    failures: tuple[TransportError, ...]

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  failure {number}: {failure}" for number, failure in enumerate(self.failures, 1)]
        return "\n".join(lines)


class FileWriteError(TransportError):
    """The file for a received snapshot cannot be written or renamed; ``path`` is the path of the file."""


class CheckpointError(TransportError):
    """A durable checkpoint could not be written or read. ``rank``: Group rank on which this failed, if known."""

    rank: int | None = None


class CheckpointNotFoundError(CheckpointError, LookupError):
    """No complete checkpoint of that step exists, or no checkpoint at all."""


class CheckpointExistsError(CheckpointError):
    """A checkpoint of that step exists, and the save may not replace it."""


@dataclass(eq=False, repr=False, kw_only=True)
class CheckpointDamagedError(CheckpointError):
    """Files of a checkpoint differ from what was written; ``files`` lists each file with its difference."""

    files: tuple[str, ...] = ()


class CheckpointUntrustedError(CheckpointError):
    """A checkpoint was not loaded, because it is not signed with the job token of this job."""


class CheckpointInUseError(CheckpointError):
    """Another group of ranks saves to this directory. Two groups would silently mix their values."""


class ReplicasDivergedError(CheckpointError):
    """Ranks that must have equal values have different ones; ``path`` names the first difference."""


@dataclass(eq=False, repr=False, kw_only=True)
class RankFailedError(CheckpointError):
    """One rank failed in a phase that all ranks run together; every rank raises this error.

    ``rank``: The group rank that failed. ``phase``: The name of the phase. ``cause_type``: The class name of the
    exception on the failed rank. ``errno``: The errno of that exception, if it is an ``OSError``.
    """

    rank: int
    phase: str
    cause_type: str
    errno: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RankGoneError(CheckpointError, TimeoutError):
    """Some ranks did not answer before the deadline; ``ranks`` lists these ranks."""

    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.rank = self.ranks[0] if self.ranks else None


class SaveInProgressError(CheckpointError):
    """The previous save is not finished, and the settings refuse a new save meanwhile; the caller may retry."""

    retryable = True


class WriterFailedError(CheckpointError):
    """A writer process died or hangs, or could not be started. The save starts a new process and retries."""

    retryable = True


class PublishError(TransportError):
    """A version could not be published. ``report``: The result of each engine, if engines were notified."""

    report: Any = None


class StaleVersionError(PublishError):
    """The version is not newer than every published version; versions must increase."""


@dataclass(eq=False, repr=False, kw_only=True)
class EngineRefusedError(PublishError):
    """An engine responded with an error, or uses another version than the published one.

    ``request``: Method and URL of the request. ``status``: Status of the engine's response. ``body``: Body of that
    response, as the engine sent it. The message and reports quote the body with its control characters escaped.
    """

    status: int | None = None
    body: str = ""
    request: str = ""


class EngineUnreachableError(PublishError):
    """The connection to an engine failed, or broke before the response was complete. The publisher retries."""

    retryable = True


class DeadlineExceededError(TransportError, TimeoutError):
    """A wait timed out. The message names the awaited event, the time and the progress."""
