"""The peers of a fetch: finds peers that serve the same content, and restarts if a peer replaces its snapshot."""

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
from ft_transport.http.client.chunks import SourceFile
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import fetch_digests, fetch_manifest
from ft_transport.http.client.same_host import is_on_this_host
from ft_transport.http.peer_address import PeerAddress, peer_addresses
from ft_transport.runtime.handler_safety import SafeThread
from ft_transport.runtime.threads import start
from ft_transport.telemetry.recorder import current
from ft_transport.wire.manifest import ContentId, Manifest, content_id
from ft_transport.wire.routes import StepSelector

R = TypeVar("R")

logger = logging.getLogger(__name__)

_LEAST_PATIENCE_S: Final = 1.0
_MORE_PATIENCE: Final = 1.0
"""Longest wait for the other manifests once the first has come, as a multiple of the time that the first took."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPeers:
    """The peers that have a state, and the receivers that fetch it at the same time.

    Attributes:
        sources: The peers that have it.
        receivers: All receivers, this one included, in an order that is the same for all; empty without others.
        own: This receiver's index in ``receivers``.
    """

    sources: Sequence[PeerAddress]
    receivers: Sequence[PeerAddress] = ()
    own: int = 0

    @classmethod
    def of(cls, sources: str | Sequence[str], *, relays: Sequence[str], own: str) -> FetchPeers:
        """Parse URLs, as ``HTTPTransport.fetch`` takes them.

        Args:
            sources: URL of one peer, or of several.
            relays: URLs of all receivers, in any order.
            own: URL of this receiver, which ``relays`` need not contain.

        Raises:
            ConfigurationError: A URL is invalid.
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
        manifest: Manifest of the first peer.
        files: Location of the content at each peer.
        connection: Connection to the first peer. While it is open, that peer keeps its snapshot for its lease after
            each request.
        content: Identifies the content; ``None`` if no agreement was needed.
    """

    manifest: Manifest
    files: tuple[SourceFile, ...]
    connection: Connection
    content: ContentId | None = None

    def manifest_with_digests(self, settings: FetchSettings) -> Manifest:
        """Return the manifest with digests; requests them if they come after the data.

        Raises:
            TransportError: The source did not send them.
        """
        return _with_digests(self.connection, self.manifest, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """The snapshot that one peer serves."""

    connection: Connection
    manifest: Manifest
    content: ContentId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Silent:
    """The reason why one peer's snapshot is unknown."""

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
    """Return the peers that serve the newest step and agree with most others on its content.

    If as many peers have one content as another, all receivers choose the same content, whatever the order of the
    peers.

    Peers that do not answer long after the first answer are left out, and so are peers that serve another content; the
    log names them.

    Args:
        peers: The peers.
        step: A step or ``latest``.
        settings: How to fetch.
        held: Owns their connections.
        is_relayed: Whether other receivers have to agree as well, also on the content of one peer.
        is_this_host_first: Whether a peer on this host that lends its memory comes first, wherever it is listed.

    Raises:
        FetchFailedError: No peer answered; carries the reasons.
        TransportError: The error of the only peer.
    """
    if len(peers) == 1 and not is_relayed:
        connection = held.enter_context(Connection.of(peers[0], settings))
        manifest = fetch_manifest(connection, step, settings)
        settings.timeouts.note_progress()
        return AgreedSources(manifest=manifest, files=(SourceFile.of(peers[0], manifest),), connection=connection)
    answers = _ask_all([held.enter_context(Connection.of(peer, settings)) for peer in peers], step, settings)
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
            # Each token has its own digests: snapshots that are served while a token is replaced cannot be compared.
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
    """Restart ``receive`` if a newer snapshot replaces the snapshot of the fetch."""
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
            # Writes of an earlier attempt to the receiver's tensors count for the last attempt as well.
            error.destination_touched = touched = touched or error.destination_touched
            last = error.failures[-1] if isinstance(error, FetchFailedError) else error
            if isinstance(last, MessageDamagedError) and last.refusal is not None:
                last = last.refusal
            if not isinstance(last, SnapshotReplacedError):
                raise
            recording = current()
            if recording is not None:
                recording.retry(last, peer=last.peer or "")
        # Immediately the first time, then ever later, in case the peer reports this for all that it serves.
        time.sleep(max(0.0, min(pause_s, settings.timeouts.end_s() - time.monotonic())))
        pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)


def _ask_all(connections: Sequence[Connection], step: StepSelector, settings: FetchSettings) -> list[_Answer]:
    """Return the answers, in the order of the connections."""
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
        # Each connection has the deadline of the fetch: without a first answer all of them end at that deadline.
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
    """Return the answer of a source that was too late, with the reason if no connection was made."""
    why = "expected to hear what it serves about when the others said so"
    if isinstance(answer, _Silent):
        if not isinstance(answer.error, TransportError):
            return answer
        # A connection to a listening peer ended because this side stopped waiting.
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
    """Return until when to wait for the others, if the first peer has just answered."""
    now_s = time.monotonic()
    return now_s + max(_LEAST_PATIENCE_S, _MORE_PATIENCE * (now_s - began_s))


def _failure(silent: Sequence[_Silent]) -> BaseException:
    """Return the error if no peer serves anything."""
    errors = [each.error for each in silent]
    unexpected = next((error for error in errors if not isinstance(error, TransportError)), None)
    if unexpected is not None or len(errors) == 1:
        return unexpected or errors[0]
    names = ", ".join(str(each.connection.peer) for each in silent)
    return FetchFailedError(
        f"expected a snapshot from one of {names}, none says what it serves",
        failures=tuple(error for error in errors if isinstance(error, TransportError)),
    )
