"""The peers of a fetch: which of them serve the same content, and a new start where they replace it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias, TypeVar

from ft_transport.errors import (
    ConfigurationError,
    FetchFailedError,
    MessageDamagedError,
    PeerUnreachableError,
    SnapshotReplacedError,
    TransportError,
)
from ft_transport.http.chunk_client import SourceFile
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.http.late_digests import fetch_digests
from ft_transport.http.manifest_client import fetch_manifest
from ft_transport.http.peer_address import PeerAddress, peer_addresses
from ft_transport.http.same_host_client import is_on_this_host
from ft_transport.runtime.handler_safety import SafeThread
from ft_transport.runtime.threads import start
from ft_transport.telemetry.recorder import current
from ft_transport.wire.manifest import ContentId, Manifest, content_id
from ft_transport.wire.routes import StepSelector

R = TypeVar("R")

logger = logging.getLogger(__name__)

_LEAST_PATIENCE_S: Final = 1.0
_MORE_PATIENCE: Final = 1.0
"""How much longer the other manifests are waited for once one is there: so many times as long as that one took."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPeers:
    """Who has a state, and who receives it now.

    Attributes:
        sources: The peers that have it.
        receivers: Who receives it now, this one too, in an order that is the same for all; empty where nobody else.
        own: Which of these this one is.
    """

    sources: Sequence[PeerAddress]
    receivers: Sequence[PeerAddress] = ()
    own: int = 0

    @classmethod
    def of(cls, sources: str | Sequence[str], *, relays: Sequence[str], own: str) -> FetchPeers:
        """From URLs, as ``HTTPTransport.fetch`` takes them.

        Args:
            sources: Of one peer, or of several.
            relays: Of all receivers, in any order.
            own: Of this one, which need not be among them.

        Raises:
            ConfigurationError: One of them is none.
        """
        having = [PeerAddress.from_url(sources)] if isinstance(sources, str) else peer_addresses(sources)
        if isinstance(relays, str) or not isinstance(relays, Collection):
            raise ConfigurationError(f"expected a sequence of addresses as relays, got {relays!r}")
        this = PeerAddress.from_url(own)
        others = {PeerAddress.from_url(each) for each in relays} - {this}
        if not others:
            return cls(sources=having)
        receivers = sorted({*others, this}, key=str)
        return cls(sources=having, receivers=receivers, own=receivers.index(this))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedSources:
    """Peers that serve the same content.

    Attributes:
        manifest: Of the first of them.
        files: Where each has the content.
        connection: To the first. While it is open, that peer keeps its snapshot for its lease after each request.
        content: What it is; ``None`` where nobody had to agree on it.
    """

    manifest: Manifest
    files: tuple[SourceFile, ...]
    connection: Connection
    content: ContentId | None = None

    def manifest_with_digests(self, settings: FetchSettings) -> Manifest:
        """The manifest, with digests that are asked for if they come after the data.

        Raises:
            TransportError: The source did not say them.
        """
        return _with_digests(self.connection, self.manifest, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What one peer serves."""

    connection: Connection
    manifest: Manifest
    content: ContentId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Silent:
    """Why it is not known what one peer serves."""

    connection: Connection
    error: BaseException


_Answer: TypeAlias = _Served | _Silent


def ask_sources(
    peers: Sequence[PeerAddress],
    step: StepSelector,
    settings: FetchSettings,
    held: contextlib.ExitStack,
    *,
    is_relayed: bool = False,
    is_this_host_first: bool = False,
) -> AgreedSources:
    """What peers serve: those of the newest step that agree with most others of it.

    Of contents that as many have, all receivers take the same one, in whichever order they are told the peers.

    Who says nothing for long after the first one has answered is left out, and so is who serves something else; the
    log names them.

    Args:
        peers: The peers.
        step: A step or ``latest``.
        settings: How to fetch.
        held: Takes their connections.
        is_relayed: Whether other receivers have to agree as well, also on the content of one peer.
        is_this_host_first: Whether one that lends its memory on this host comes first, wherever it stands.

    Raises:
        FetchFailedError: None of them says what it serves; carries why.
        TransportError: What the only peer said.
    """
    if len(peers) == 1 and not is_relayed:
        connection = held.enter_context(settings.connection_to(peers[0]))
        manifest = fetch_manifest(connection, step, settings)
        settings.timeouts.note_progress()
        return AgreedSources(manifest=manifest, files=(SourceFile.of(peers[0], manifest),), connection=connection)
    answers = _ask_all([held.enter_context(settings.connection_to(peer)) for peer in peers], step, settings)
    served = [answer for answer in answers if isinstance(answer, _Served)]
    silent = [answer for answer in answers if isinstance(answer, _Silent)]
    if not served:
        raise _failure(silent)
    for answer in silent:
        logger.warning("source %s is left out: %s", answer.connection.peer, answer.error)
    newest = max(answer.manifest.step for answer in served)
    num_having = Counter(each.content for each in served if each.manifest.step == newest)
    content = max(num_having, key=lambda content: (num_having[content], content))
    agreed = [each for each in served if each.content == content]
    if is_this_host_first:
        agreed.sort(key=lambda each: not is_on_this_host(each.connection))
    digest_name = agreed[0].manifest.digester.name
    for each in served:
        if each.content != content:
            # Each token digests in its own way: those that are served while a token is replaced cannot be compared.
            is_other_way = each.manifest.step == newest and each.manifest.digester.name != digest_name
            logger.warning(
                "source %s is left out: expected the state of step %d as %d of %d have it (content %s), it has step "
                "%d (content %s)%s",
                each.connection.peer,
                newest,
                len(agreed),
                len(served),
                content,
                each.manifest.step,
                each.content,
                f"; its digests are {each.manifest.digester.name}, and not {digest_name}" if is_other_way else "",
            )
    settings.timeouts.note_progress()
    return AgreedSources(
        manifest=agreed[0].manifest,
        files=tuple(SourceFile.of(each.connection.peer, each.manifest) for each in agreed),
        connection=agreed[0].connection,
        content=content,
    )


def with_restarts(settings: FetchSettings, receive: Callable[[], R]) -> R:
    """Begins again where a newer snapshot has taken the place of the one that a fetch was bound to."""
    touched = False
    pause_s = 0.0
    while True:
        try:
            return receive()
        except Exception as error:
            if not isinstance(error, TransportError):
                if touched:
                    error.destination_touched = True  # type: ignore[attr-defined]
                raise
            # What an earlier attempt did to the receiver's tensors holds for the last one as well.
            error.destination_touched = touched = touched or error.destination_touched
            last = error.failures[-1] if isinstance(error, FetchFailedError) else error
            if isinstance(last, MessageDamagedError) and last.refusal is not None:
                last = last.refusal
            if not isinstance(last, SnapshotReplacedError):
                raise
            recording = current()
            if recording is not None:
                recording.retry(last, peer=last.peer or "")
        # At once the first time, and then ever later, in case the peer says so of all that it serves.
        time.sleep(max(0.0, min(pause_s, settings.timeouts.end_s() - time.monotonic())))
        pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)


def _ask_all(connections: Sequence[Connection], step: StepSelector, settings: FetchSettings) -> list[_Answer]:
    """The answers, in the order of the connections."""
    answered: SimpleQueue[tuple[int, _Answer]] = SimpleQueue()

    def ask(index: int) -> None:
        try:
            answered.put((index, _ask(connections[index], step, settings)))
        except BaseException as error:
            answered.put((index, _Silent(connection=connections[index], error=error)))

    threads = [
        SafeThread(target=ask, args=(index,), name=f"ft-transport-ask-{index}", daemon=True)
        for index in range(len(connections))
    ]
    answers: dict[int, _Answer] = {}
    try:
        for thread in threads:
            start(thread)
        began_s = time.monotonic()
        until_s: float | None = None
        # Each connection has the deadline of the fetch: without a first answer all of them end with that.
        while len(answers) < len(connections):
            try:
                index, answer = answered.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except Empty:
                break
            answers[index] = answer
            if until_s is None and isinstance(answer, _Served):
                until_s = _patient_until_s(began_s)
    finally:
        for index, connection in enumerate(connections):
            if index not in answers:
                connection.interrupt()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    with contextlib.suppress(Empty):
        while True:
            index, answer = answered.get_nowait()
            answers[index] = _late(answer)
    return [answers[index] for index in range(len(connections))]


def _late(answer: _Answer) -> _Silent:
    """The answer of a source that was given up as late, with the reason if no connection was made."""
    why = "expected to hear what it serves about when the others said so"
    if isinstance(answer, _Silent):
        if not isinstance(answer.error, TransportError):
            return answer
        # What ends a connection at which somebody listens is that it is not waited for.
        if not answer.connection.num_opened:
            why = f"{why}; {answer.error.message}"
    return _Silent(connection=answer.connection, error=PeerUnreachableError(why, peer=str(answer.connection.peer)))


def _ask(connection: Connection, step: StepSelector, settings: FetchSettings) -> _Served:
    manifest = _with_digests(connection, fetch_manifest(connection, step, settings), settings)
    return _Served(connection=connection, manifest=manifest, content=content_id(manifest))


def _with_digests(connection: Connection, manifest: Manifest, settings: FetchSettings) -> Manifest:
    if manifest.digests is not None:
        return manifest
    digests = fetch_digests(connection, manifest, max_failures=settings.max_failures)
    return dataclasses.replace(manifest, digests=digests)


def _patient_until_s(began_s: float) -> float:
    """How long others are waited for when the first one has just answered."""
    now_s = time.monotonic()
    return now_s + max(_LEAST_PATIENCE_S, _MORE_PATIENCE * (now_s - began_s))


def _failure(silent: Sequence[_Silent]) -> BaseException:
    """Why nobody serves anything."""
    errors = [each.error for each in silent]
    unexpected = next((error for error in errors if not isinstance(error, TransportError)), None)
    if unexpected is not None or len(errors) == 1:
        return unexpected or errors[0]
    names = ", ".join(str(each.connection.peer) for each in silent)
    return FetchFailedError(
        f"expected a snapshot from one of {names}, none says what it serves",
        failures=tuple(error for error in errors if isinstance(error, TransportError)),
    )
