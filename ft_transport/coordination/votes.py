"""The votes with which ranks report success or failure to each other, and the verdict that `tally` derives from them.

Ranks may fail in different ways: a directory is missing on one host, a disk is full on another. So each rank reports
its own failure as plain values, and all ranks derive the same verdict from all votes. The module is pure.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ft_transport import errors
from ft_transport.errors import (
    CheckpointDamagedError,
    FetchFailedError,
    PeerProtocolError,
    RankFailedError,
    RankGoneError,
    TransportError,
)
from ft_transport.runtime.decoding import DECODE_ERRORS

T = TypeVar("T")

RETRYABLE_ERRNOS: Final = frozenset(
    {
        errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ENETDOWN,
        errno.ENETUNREACH, errno.ENETRESET, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.EREMOTEIO,
    }
)  # fmt: skip
"""Error numbers of a file system or a disk that a retry may cure. Others, such as those of a refused permission or a
full disk, would occur again."""

Plain: TypeAlias = bool | int | float | str | tuple[int | str, ...] | None
"""The types of an error's fields that a vote can contain."""

_NOT_SENT: Final = frozenset({"message", "failures", "destination_touched"})
"""Fields that a vote leaves out: `Failure` has fields for the first two; the third describes this rank's tensors."""

_MAX_MESSAGE_CHARACTERS: Final = 2000
_MAX_VOTE_BYTES: Final = 1 << 24
"""A larger message is not decoded, because votes are small."""
_MAX_SHOWN: Final = 8
_SAME_EVERYWHERE: Final = (
    errors.CheckpointNotFoundError,
    errors.CheckpointExistsError,
    errors.CheckpointInUseError,
    errors.CheckpointDamagedError,
    errors.CheckpointUntrustedError,
    errors.ReplicasDivergedError,
)
"""Errors about resources that all ranks share. Their message does not say which rank has found the error."""


class Failure(Struct, frozen=True, array_like=True, kw_only=True):
    """The failure of one rank, from which another rank can rebuild the exception.

    Attributes:
        kind: Name of the exception's class.
        message: The exception's message.
        errno: The error number of an ``OSError``; ``None`` for other exceptions.
        filename: The file name of an ``OSError``; ``None`` without one.
        fields: The fields of a ``TransportError`` by name, such as peer, step, path and damaged files.
        failures: The single failures that a ``FetchFailedError`` summarises.
        is_retryable: Whether a retry a moment later may succeed.
        is_consequence: Whether the rank only stopped because another rank had failed.
    """

    kind: str
    message: str
    errno: int | None = None
    filename: str | None = None
    fields: dict[str, Plain] = msgspec.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    is_retryable: bool = False
    is_consequence: bool = False


class Vote(Struct, frozen=True, array_like=True, kw_only=True):
    """The report of one rank after its part of a phase.

    Attributes:
        phase: Name of the phase. Ranks whose votes have different names are out of step.
        failure: The rank's failure; ``None`` after a success.
        payload: The result of the rank's part, for the other ranks.
        nonce: Random text of the rank's process, so that a verdict of another run is recognised.
        last_verdict: Digest of the last verdict that the rank has read, so that a vote of another run is recognised.
    """

    phase: str
    failure: Failure | None = None
    payload: bytes = b""
    nonce: str = ""
    last_verdict: str = ""


_vote_decoder: Final = msgspec.msgpack.Decoder(Vote)
_votes_decoder: Final = msgspec.json.Decoder(list[Vote | None])


@dataclass(frozen=True, slots=True)
class GoOn:
    """The verdict that all ranks succeeded.

    Attributes:
        payloads: The results of the ranks, by rank.
    """

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The verdict that at least one rank failed, and that a retry may succeed.

    Attributes:
        error: The error to raise if there is no further attempt.
    """

    error: TransportError


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The verdict that a rank failed, and that no retry can succeed.

    Attributes:
        error: The error to raise.
    """

    error: TransportError


Verdict: TypeAlias = GoOn | TryAgain | GiveUp


class AbandonedError(Exception):
    """This rank stopped its part of a phase because another rank has failed."""


def describe(error: BaseException) -> Failure:
    """Describe an exception for the other ranks. Its class and errno decide whether it is retryable, not its text."""
    message, is_retryable = str(error), False
    number = filename = None
    if isinstance(error, TransportError):
        message, is_retryable = error.message, error.retryable
    elif isinstance(error, OSError):
        number, filename, is_retryable = error.errno, error.filename, error.errno in RETRYABLE_ERRNOS
        message = error.strerror or message  # without errno and file name, which str() adds on the other rank as well
    return Failure(
        kind=type(error).__name__,
        message=_sendable(message),
        errno=number,
        filename=_sendable(str(filename)) if filename is not None else None,
        fields=_plain_fields(error) if isinstance(error, TransportError) else {},
        failures=tuple(map(describe, error.failures)) if isinstance(error, FetchFailedError) else (),
        is_retryable=is_retryable,
        is_consequence=isinstance(error, AbandonedError),
    )


def tally(votes: Sequence[Vote | None], *, step: int | str | None = None) -> Verdict:
    """Return the verdict on a phase, which is the same on every rank.

    Args:
        votes: The votes by rank; ``None`` for a rank that did not vote in time.
        step: The step, for the error.
    """
    missing = tuple(rank for rank, vote in enumerate(votes) if vote is None)
    cast = [(rank, vote) for rank, vote in enumerate(votes) if vote is not None]
    if missing:
        phase = cast[0][1].phase if cast else "?"
        return GiveUp(
            RankGoneError(
                f"expected all {len(votes)} ranks to end {phase!r} before the deadline, got nothing from "
                f"{_ranks(missing)}: dead, stuck, or elsewhere in the program",
                ranks=missing,
                step=step,
            )
        )
    phases = {vote.phase for _, vote in cast}
    if len(phases) > 1:
        shown = "; ".join(f"rank {rank}: {vote.phase!r}" for rank, vote in cast[:_MAX_SHOWN])
        return GiveUp(errors.CheckpointError(f"expected all ranks in the same phase, got {shown}", step=step))
    failures = [(rank, vote.failure) for rank, vote in cast if vote.failure is not None]
    if not failures:
        return GoOn(tuple(vote.payload for _, vote in cast))
    causes = [(rank, failure) for rank, failure in failures if not failure.is_consequence] or failures
    # A rank that reports a missing peer may have missed one that had failed: prefer the failure of the latter.
    causes = [(rank, failure) for rank, failure in causes if failure.kind != RankGoneError.__name__] or causes
    final = [(rank, failure) for rank, failure in causes if not failure.is_retryable]
    rank, failure = (final or causes)[0]
    error = _error(failure, rank, cast[0][1].phase, [other for other, _ in causes if other != rank], step)
    return GiveUp(error) if final else TryAgain(error)


def encode(vote: Vote) -> bytes:
    """Encode a vote as a message to rank 0."""
    return msgspec.msgpack.encode(vote)


def encode_all(votes: Sequence[Vote | None]) -> bytes:
    """Encode all votes as one message, in JSON, because the key-value store can only compare text."""
    return msgspec.json.encode(list(votes))


def decode(encoded: bytes) -> Vote:
    """Decode a message that `encode` has made.

    Raises:
        PeerProtocolError: The message contains no vote.
    """
    return _decoded(encoded, _vote_decoder, _MAX_VOTE_BYTES)


def decode_all(encoded: bytes, size: int) -> list[Vote | None]:
    """Decode a message that `encode_all` has made.

    Args:
        encoded: The message.
        size: Number of ranks.

    Raises:
        PeerProtocolError: The message does not contain one vote for each rank.
    """
    # One byte of a vote may become six characters of JSON.
    votes = _decoded(encoded, _votes_decoder, 6 * size * _MAX_VOTE_BYTES)
    if len(votes) != size:
        raise PeerProtocolError(f"expected the votes of {size} ranks, got {len(votes)}")
    return votes


def rebuild(failure: Failure) -> Exception:
    """Return the exception of another process; a ``CheckpointError`` if this process does not know its class."""
    known = getattr(errors, failure.kind, None)
    if isinstance(known, type) and issubclass(known, TransportError):
        # Without the constructor: some classes compose the message from other arguments.
        error = known.__new__(known)
        TransportError.__init__(error, failure.message)
        vars(error).update(failure.fields)
        if isinstance(error, FetchFailedError):
            error.failures = tuple(each for each in map(rebuild, failure.failures) if isinstance(each, TransportError))
        return error
    if failure.is_consequence:
        return AbandonedError(failure.message)
    raised = _as_raised(failure)
    return raised if raised is not None else errors.CheckpointError(f"{failure.kind}: {failure.message}")


def _error(failure: Failure, rank: int, phase: str, others: Sequence[int], step: int | str | None) -> TransportError:
    where = f"rank {rank}" + (f" ({_ranks(others)} failed, too)" if others else "")
    text = f"{where}, {phase}: {failure.message}"
    rebuilt = rebuild(failure)
    if isinstance(rebuilt, TransportError) and _is_raised_everywhere(type(rebuilt), failure.kind):
        rebuilt.step = step
        if not isinstance(rebuilt, _SAME_EVERYWHERE):
            rebuilt.message = text
        if isinstance(rebuilt, errors.CheckpointError):
            rebuilt.rank = rank
        return rebuilt
    failed = RankFailedError(
        f"{where} failed in {phase!r}: {failure.kind}: {_message_of(failure)}",
        rank=rank,
        phase=phase,
        cause_type=failure.kind,
        errno=failure.errno,
        step=step,
    )
    failed.__cause__ = _as_raised(failure)
    return failed


def _is_raised_everywhere(found: type[TransportError], kind: str) -> bool:
    """Return whether all ranks raise the rebuilt error itself instead of a ``RankFailedError``.

    If its class has a constructor of its own, they do not: such an error describes the failed rank alone.

    Args:
        found: The class of the rebuilt error.
        kind: The name of the class on the failed rank.
    """
    return found.__name__ == kind and (
        found.__init__ is TransportError.__init__ or issubclass(found, CheckpointDamagedError)
    )


def _plain_fields(error: TransportError) -> dict[str, Plain]:
    fields: dict[str, Plain] = {}
    for name, value in vars(error).items():
        if name.startswith("_") or name in _NOT_SENT:
            continue
        with suppress(msgspec.ValidationError):
            sent = _sendable(value) if isinstance(value, str) else value
            fields[name] = msgspec.convert(sent, Plain)  # noqa: TID251 # of built-in types, of which nothing is kept
    return fields


def _sendable(text: str) -> str:
    """Truncate a text, and replace undecodable bytes, which a file name may contain (PEP 383)."""
    return text[:_MAX_MESSAGE_CHARACTERS].encode(errors="backslashreplace").decode()


def _decoded(encoded: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], max_bytes: int) -> T:
    if len(encoded) > max_bytes:
        raise PeerProtocolError(f"expected a rank to send at most {max_bytes} bytes, got {len(encoded)}")
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected votes of ranks, got {encoded[:_MAX_SHOWN]!r}…: {error}") from error


def _as_raised(failure: Failure) -> Exception | None:
    """Return the exception of another rank, if its class is built into Python; otherwise ``None``."""
    kind = getattr(builtins, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    if failure.errno is None:
        try:
            return kind(failure.message)
        except TypeError:
            # UnicodeError and exception groups have constructors with other arguments.
            return None
    arguments = (failure.filename,) if failure.filename is not None else ()
    return OSError(failure.errno, failure.message, *arguments)


def _message_of(failure: Failure) -> str:
    """Return the message of another rank's exception, with errno and file name for an ``OSError``."""
    raised = _as_raised(failure)
    return str(raised) if failure.errno is not None and raised is not None else failure.message


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) + (", …" if len(ranks) > _MAX_SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
