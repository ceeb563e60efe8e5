"""Every error that leaves this package, one tree.

TransportError
├── ConfigurationError          a setting that cannot work, found at construction
├── RecordError                 a line that tells of no recovery, save or publish
├── ManifestError               a description of a snapshot that is malformed, too new or over a limit
├── SnapshotError               a state that cannot be captured
│   ├── UnsupportedLeafError    a leaf with no safe encoding, named by its path
│   ├── CollectiveRefusedError  a state function that other ranks would have to take part in
│   ├── StateMovedError         tensors changed in place between the step boundary and their copy
│   └── SnapshotLimitError      as many snapshots alive as are allowed, and each one still read
├── RestoreError                a received tensor or leaf that cannot be put where it belongs
├── IntegrityError              bytes that differ from their digest
├── PeerError                   one peer did not do what was asked
│   ├── PeerUnreachableError    no connection, or it broke
│   │   ├── PeerSilentError     nothing comes from it, or too little
│   │   └── UnknownHostError    nobody knows an address for the peer's name
│   ├── PeerProtocolError       an answer outside the protocol
│   │   └── MessageDamagedError a request, or the head of its answer, was damaged on its way
│   ├── PeerAuthenticationError the job token or a certificate is missing or wrong
│   ├── PeerNotReadyError       the peer has no snapshot yet
│   ├── StateNotServedError     the peer cannot capture its state; asking again does not help
│   ├── StepNotServedError      the peer serves other steps
│   └── SnapshotReplacedError   the snapshot that a fetch was bound to is gone
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
│   ├── StaleVersionError       it is not newer than what was published before
│   ├── EngineRefusedError      an engine answered with an error, or uses another version
│   └── EngineUnreachableError  no connection to an engine, or it broke
└── DeadlineExceededError       a wait ran out (also a TimeoutError)

``retryable`` says whether the same request may succeed later or elsewhere: a fetch (``wire/fetch.py``) and a save
(``coordination/votes.py``) are repeated then. ``http_status`` is the status that the server answers when the error is
the cause; ``destination_touched`` is set where bytes had landed in the receiver's own tensors, which were then
overwritten with a pattern that reads as NaN, or kept as ``partial`` for another fetch to go on from. All of them
pickle, so they can cross a process boundary; ``partial`` stays behind.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Final, TypedDict

from typing_extensions import Unpack

_MAX_WHERE_CHARACTERS: Final = 1000


def escape_peer_text(text: str, *, max_characters: int) -> str:
    """Text from a peer as it may stand in a message or a log: one line, and nothing that moves or hides other text.

    Control characters, line ends, bidirectional and other invisible marks, and lone surrogates become escapes as in a
    Python string; what is longer is cut off.
    """
    if len(text) <= max_characters and text.isprintable():
        return text
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:max_characters]
    )
    return shown[:max_characters] + "…" if max(len(text), len(shown)) > max_characters else shown


def escape_controls(text: str) -> str:
    """Text with the escapes of `escape_peer_text`, but of any length and with its line ends: for a whole message."""
    if text.isprintable():
        return text
    return "\n".join(escape_peer_text(line, max_characters=sys.maxsize) for line in text.split("\n"))


class _Where(TypedDict, total=False):
    """Where an error belongs; `TransportError` says what each is."""

    peer: str | None
    step: int | str | None
    path: str | None


def _rebuild(cls: type[TransportError], fields: dict[str, Any]) -> TransportError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error


class TransportError(Exception):
    """Root of the tree.

    Args:
        message: What was expected and what came.
        peer: ``host:port`` of the peer concerned, where there is one.
        step: The training step concerned, where there is one.
        path: The place in the nested state (or the tensor's name), where there is one.
    """

    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    destination_touched: bool = False
    partial: Any = None

    def __init__(
        self, message: str, *, peer: str | None = None, step: int | str | None = None, path: str | None = None
    ) -> None:
        super().__init__()
        self.message = message
        self.peer = peer
        self.step = step
        self.path = path

    def __str__(self) -> str:
        where = [
            f"{name} {escape_peer_text(str(value), max_characters=_MAX_WHERE_CHARACTERS)}"
            for name, value in (("at", self.path), ("peer", self.peer), ("step", self.step))
            if value is not None
        ]
        # A message may quote a peer, an engine or a file, and ends in a terminal.
        message = escape_controls(self.message)
        text = f"{message} ({', '.join(where)})" if where else message
        if self.partial is not None:
            text += "; what had landed is kept"
            if self.destination_touched:
                text += ", and the receiver's own tensors hold part of the state"
        elif self.destination_touched:
            text += "; the receiver's own tensors held part of the state and were overwritten with NaN patterns"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), {name: value for name, value in self.__dict__.items() if name != "partial"}))


class ConfigurationError(TransportError, ValueError):
    """A setting that cannot work: an unknown interface, a negative limit, an unusable address."""

    http_status = 400


class RecordError(TransportError, ValueError):
    """A line of a file of records is none, or of a kind that is not known here."""


class ManifestError(TransportError, ValueError):
    """A manifest that is malformed, of a newer format, or larger than the limit."""

    http_status = 502


class SnapshotError(TransportError):
    """The state could not be captured; nothing was published and the lock was released."""


class UnsupportedLeafError(SnapshotError, TypeError):
    """A leaf has no safe encoding. ``path`` names it; ``register_encoding`` can give its type one."""


class CollectiveRefusedError(SnapshotError):
    """A state function runs a collective, which would wait for ranks that are not asked for their state."""


class StateMovedError(SnapshotError):
    """Tensors changed in place after the step boundary, outside of an optimizer's step; nothing was published."""

    retryable = True
    http_status = 503


class SnapshotLimitError(SnapshotError):
    """The limit on snapshots alive at once is reached and every one of them is still being read."""

    retryable = True
    http_status = 503


class RestoreError(TransportError):
    """A received tensor or leaf cannot be put where it belongs; ``path`` names it."""


class IntegrityError(TransportError):
    """Bytes differ from their digest.

    Args:
        message: What was being verified.
        chunk: Index of the chunk, or ``None`` for the manifest itself.
        expected: Digest that the manifest gives.
        actual: Digest of the bytes that came.
        **where: As for `TransportError`.
    """

    retryable = True

    def __init__(self, message: str, *, chunk: int | None, expected: int, actual: int, **where: Unpack[_Where]) -> None:
        super().__init__(f"{message}: expected digest {expected:016x}, the bytes that came have {actual:016x}", **where)
        self.chunk = chunk
        self.expected = expected
        self.actual = actual


class PeerError(TransportError):
    """One peer did not do what was asked of it."""


class PeerUnreachableError(PeerError, ConnectionError):
    """No connection to the peer could be made, or it broke off."""

    retryable = True


class PeerSilentError(PeerUnreachableError):
    """Nothing came from the peer for longer than the stall timeout, or less than the minimum throughput."""


class UnknownHostError(PeerUnreachableError):
    """Nobody knows an address for the host name that the peer was given."""

    retryable = False


class PeerProtocolError(PeerError):
    """The peer answered outside the protocol (wrong status, length, range or header)."""


class MessageDamagedError(PeerProtocolError):
    """The peer did not understand what was asked, or its answer did not come as it was meant: asking again may help.

    ``refusal`` is what the answer means if it was meant after all: a server of another kind does not say what it has
    understood.
    """

    retryable = True
    refusal: TransportError | None = None

    def __init__(self, message: str, *, refusal: TransportError | None = None, **where: Unpack[_Where]) -> None:
        super().__init__(message, **where)
        self.refusal = refusal


class PeerAuthenticationError(PeerError):
    """The peer has no proof of the job token or no certificate that is good, or this process has none for the peer."""

    http_status = 401


class PeerNotReadyError(PeerError):
    """The peer has not taken a snapshot yet, or none since it was asked.

    ``retry_after_s`` is its own estimate, in seconds; ``after`` what to repeat to it, see ``wire.routes``.
    """

    retryable = True
    http_status = 503

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, after: int | None = None, **where: Unpack[_Where]
    ) -> None:
        super().__init__(message, **where)
        self.retry_after_s = retry_after_s
        self.after = after


class StateNotServedError(PeerError):
    """The peer cannot capture its state: a leaf has no encoding, or a state function fails. Asking again is no help."""

    http_status = 501


class StepNotServedError(PeerError):
    """The peer serves other steps than the one asked for; ``served`` lists them.

    ``is_past`` says that the peer has gone beyond that step without a snapshot of it.
    """

    http_status = 404

    def __init__(
        self, message: str, *, served: tuple[int, ...] = (), is_past: bool = False, **where: Unpack[_Where]
    ) -> None:
        super().__init__(message, **where)
        self.served = served
        self.is_past = is_past


class SnapshotReplacedError(PeerError):
    """The snapshot to which the fetch was bound is no longer served; start again with the one that is."""

    retryable = True
    http_status = 409


class FetchFailedError(TransportError):
    """No source could deliver the whole snapshot.

    ``failures`` holds what went wrong, in order.
    """

    def __init__(self, message: str, *, failures: tuple[TransportError, ...], **where: Unpack[_Where]) -> None:
        super().__init__(message, **where)
        self.failures = failures

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  failure {number}: {failure}" for number, failure in enumerate(self.failures, 1)]
        return "\n".join(lines)


class FileWriteError(TransportError):
    """A file that a snapshot is received into cannot be written or named; ``path`` is that of the file."""


class CheckpointError(TransportError):
    """A durable checkpoint could not be written or read. ``rank`` is the group rank that it happened on, if one."""

    rank: int | None = None


class CheckpointNotFoundError(CheckpointError, LookupError):
    """There is no complete checkpoint of that step, or none at all."""


class CheckpointExistsError(CheckpointError):
    """There is a checkpoint of that step already, and it is not to be replaced."""


class CheckpointDamagedError(CheckpointError):
    """Files differ from what was written; ``files`` names them, each with what is wrong with it."""

    def __init__(self, message: str, *, files: tuple[str, ...] = (), **where: Unpack[_Where]) -> None:
        super().__init__(message, **where)
        self.files = files


class CheckpointUntrustedError(CheckpointError):
    """A checkpoint is not signed with the job token, or was signed for another job; it is not loaded."""


class CheckpointInUseError(CheckpointError):
    """Another group of ranks saves to this place; two would mix their values without a sign of it."""


class ReplicasDivergedError(CheckpointError):
    """Ranks that have to hold the same hold different values; ``path`` names the first."""


class RankFailedError(CheckpointError):
    """One rank failed in a phase that all take part in; the same error on every rank.

    ``rank`` says which, ``cause_type`` is the name of the exception's class there and ``errno`` its number, if it has
    one; ``phase`` is what the ranks were doing.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        phase: str,
        cause_type: str,
        errno: int | None = None,
        **where: Unpack[_Where],
    ) -> None:
        super().__init__(message, **where)
        self.rank = rank
        self.phase = phase
        self.cause_type = cause_type
        self.errno = errno


class RankGoneError(CheckpointError, TimeoutError):
    """Ranks did not answer before the deadline; ``ranks`` lists them."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), **where: Unpack[_Where]) -> None:
        super().__init__(message, **where)
        self.ranks = ranks
        self.rank = ranks[0] if ranks else None


class SaveInProgressError(CheckpointError):
    """The save before is not finished, and the policy is not to wait for it."""

    retryable = True


class WriterFailedError(CheckpointError):
    """A writer process died, hangs, or could not be started. It is replaced."""

    retryable = True


class PublishError(TransportError):
    """A version could not be published; ``report`` says of each engine what came of it, if they were told."""

    report: Any = None


class StaleVersionError(PublishError):
    """The version is not newer than one that was published before; versions only go up."""


class EngineRefusedError(PublishError):
    """An engine answered with an error, or uses another version than it was told to.

    ``request`` is the method and URL, ``status`` and ``body`` are those of the answer, whatever its type. The body is
    as the engine sent it; in the message, and in reports, its control characters are escaped.
    """

    def __init__(
        self, message: str, *, status: int | None = None, body: str = "", request: str = "", **where: Unpack[_Where]
    ) -> None:
        super().__init__(message, **where)
        self.status = status
        self.body = body
        self.request = request


class EngineUnreachableError(PublishError):
    """No connection to an engine, or it broke before the answer was complete; it is tried again."""

    retryable = True


class DeadlineExceededError(TransportError, TimeoutError):
    """A wait ran out. The message says what was awaited, for how long and how far it had come."""
