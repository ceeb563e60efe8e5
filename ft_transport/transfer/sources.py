"""The peers of a fetch: finds peers that serve the same content, and restarts if a peer replaces its snapshot."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FetchFailedError,
    MessageDamagedError,
    PeerError,
    PeerUnreachableError,
    RestoreError,
    SnapshotReplacedError,
    StepNotServedError,
    TransportError,
)
from ft_transport.http.client.chunks import SourceFile
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import fetch_manifest, with_digests
from ft_transport.http.client.peer_status import fetch_status
from ft_transport.http.client.same_host import is_on_this_host
from ft_transport.http.client.slices import Source
from ft_transport.http.peer_address import PeerAddress, peer_addresses
from ft_transport.runtime.signal_safe import ThreadRefusedError
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.telemetry.recorder import current
from ft_transport.wire.manifest import ContentId, Manifest, content_id
from ft_transport.wire.routes import LATEST, StepSelector

R = TypeVar("R")

logger = logging.getLogger(__name__)

_LEAST_WAIT_S: Final = 1.0
"""Least time for the other manifests once the first has come; they have as long again as the first took."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_MAX_ASKED_AT_ONCE: Final = 16
_LARGEST_LEAD: Final = 1 << 16
_TICK_S: Final = 2.0
"""Interval, once a source has answered, at which the others have to show that they are alive, and their time to
answer."""


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
        return with_digests(self.connection, self.manifest, max_failures=settings.max_failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """The snapshot that one peer serves."""

    connection: Connection
    manifest: Manifest
    content: ContentId


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
    peers. Peers that do not answer long after the first answer are left out, and so are peers that serve another
    content; the log names them.

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
    served, silent = _ask_all([held.enter_context(Connection.of(peer, settings)) for peer in peers], step, settings)
    if not served:
        raise _failure(silent)
    for peer, error in silent.items():
        logger.warning("source %s is left out: %s", peer, error)
    newest = max(each.manifest.step for each in served)
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


@contextlib.contextmanager
def asking(
    connections: Sequence[Connection], ask: Callable[[Connection], R], *, at_once: int
) -> Iterator[tuple[list[Future[R]], SimpleQueue[Future[R]]]]:
    """Ask all peers at the same time; yield their answers, and a queue to which each comes in time.

    At the end, requests without an answer are interrupted, and every thread has ended.
    """
    futures: list[Future[R]] = []
    answered: SimpleQueue[Future[R]] = SimpleQueue()
    with SafeExecutor(at_once, "ft-transport-ask") as pool:
        try:
            try:
                for connection in connections:
                    futures.append(pool.submit(ask, connection))
                    futures[-1].add_done_callback(answered.put)
            except ThreadRefusedError as error:
                raise TransportError(f"expected the system to start another thread ({pool.name}): {error}") from error
            yield futures, answered
        finally:
            for connection, each in itertools.zip_longest(connections, futures):
                if each is None or not each.done():
                    connection.interrupt()


def _ask_all(
    connections: Sequence[Connection], step: StepSelector, settings: FetchSettings
) -> tuple[list[_Served], dict[PeerAddress, BaseException]]:
    """Return the answers, in the order of the connections, and the reason why a peer gave none."""

    def ask(connection: Connection) -> _Served:
        manifest = fetch_manifest(connection, step, settings)
        manifest = with_digests(connection, manifest, max_failures=settings.max_failures)
        return _Served(connection=connection, manifest=manifest, content=content_id(manifest))

    began_s = time.monotonic()
    until_s: float | None = None
    with asking(connections, ask, at_once=len(connections)) as (futures, answered):
        # Each connection has the deadline of the fetch: without a first answer all of them end at that deadline.
        for _ in connections:
            try:
                done = answered.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except Empty:
                break
            if until_s is None and done.exception() is None:
                now_s = time.monotonic()
                until_s = now_s + max(_LEAST_WAIT_S, now_s - began_s)
        are_in_time = [each.done() for each in futures]
    served: list[_Served] = []
    silent: dict[PeerAddress, BaseException] = {}
    for connection, each, is_in_time in zip(connections, futures, are_in_time, strict=True):
        error = each.exception()
        if is_in_time and error is None:
            served.append(each.result())
        elif error is not None and (is_in_time or not isinstance(error, TransportError)):
            silent[connection.peer] = error
        else:
            # A connection to a listening peer ended because this side stopped waiting.
            why = f"; {error.message}" if isinstance(error, TransportError) and not connection.num_opened else ""
            silent[connection.peer] = PeerUnreachableError(
                f"expected a manifest soon after the first of another source{why}", peer=str(connection.peer)
            )
    return served, silent


def _failure(silent: Mapping[PeerAddress, BaseException]) -> BaseException:
    """Return the error if no peer serves anything."""
    errors = list(silent.values())
    failures = tuple(error for error in errors if isinstance(error, TransportError))
    if len(errors) == 1 or len(failures) < len(errors):
        return next((error for error in errors if not isinstance(error, TransportError)), errors[0])
    names = ", ".join(map(str, silent))
    return FetchFailedError(f"expected a snapshot from one of {names}, none says what it serves", failures=failures)


def common_step(sources: Sequence[PeerAddress], settings: FetchSettings) -> int:
    """Return the common step of all sources that are asked for their latest state."""
    with ask_group(sources, LATEST, settings) as (answers, _):
        return answers[0].manifest.step


@contextlib.contextmanager
def ask_group(
    peers: Sequence[PeerAddress], step: StepSelector, settings: FetchSettings
) -> Iterator[tuple[list[Source], list[TransportError]]]:
    """Yield all sources that answer, with their manifests of one step, and the errors of the others.

    As long as this is open, the sources keep their snapshots, for the time of a lease at least.
    """
    connections: dict[PeerAddress, Connection] = {}
    gone: dict[PeerAddress, TransportError] = {}

    def ask(step: StepSelector) -> list[Source]:
        # The snapshot of the earlier request is not needed, and must not occupy its place.
        _close_all(connections)
        connections.update({peer: Connection.of(peer, settings) for peer in peers if peer not in gone})
        at_once = min(len(connections), _MAX_ASKED_AT_ONCE)
        with asking(list(connections.values()), lambda each: fetch_manifest(each, step, settings), at_once=at_once) as (
            futures,
            answered,
        ):
            answers = dict(zip(connections, futures, strict=True))
            _wait_for(answers, answered, settings)
        for peer, each in answers.items():
            error = each.exception()
            if isinstance(error, TransportError):
                # It gets no second request: the others have answered.
                gone[peer] = error
        if all(peer in gone for peer in answers):
            raise next(iter(gone.values()))
        return [Source(peer, each.result()) for peer, each in answers.items() if peer not in gone]

    try:
        yield _of_one_step(ask, step), list(gone.values())
    finally:
        _close_all(connections)


def _close_all(connections: dict[PeerAddress, Connection]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _wait_for(
    asking: Mapping[PeerAddress, Future[Manifest]], answered: SimpleQueue[Future[Manifest]], settings: FetchSettings
) -> None:
    """Wait until all sources have answered, but for those that are unreachable, or that stop responding.

    Raises:
        TransportError: The first error of another kind.
    """
    has_answer = False
    left = dict(asking)
    while left:
        try:
            done = answered.get(timeout=_TICK_S if has_answer else None)
        except Empty:
            # A source that waits for its trainer's step boundary responds meanwhile; one that hangs does not.
            left = {peer: each for peer, each in left.items() if _answers(peer, settings)}
            continue
        error = done.exception()
        if error is not None and not isinstance(error, PeerUnreachableError):
            raise error
        has_answer = has_answer or error is None
        left = {peer: each for peer, each in left.items() if each is not done}


def _answers(peer: PeerAddress, settings: FetchSettings) -> bool:
    deadline_s = min(settings.timeouts.deadline_s, time.monotonic() + _TICK_S)
    timeouts = dataclasses.replace(settings.timeouts, deadline_s=deadline_s)
    try:
        with Connection.of(peer, dataclasses.replace(settings, timeouts=timeouts)) as connection:
            fetch_status(connection)
    except (PeerError, DeadlineExceededError) as error:
        return not isinstance(error, (PeerUnreachableError, DeadlineExceededError))
    return True


def _of_one_step(ask: Callable[[StepSelector], list[Source]], step: StepSelector) -> list[Source]:
    """Ask until all sources show one step.

    Each rank begins a snapshot at its own next step boundary, so sources that are asked for their latest state may show
    neighbouring steps. Then all are asked for a step to come, ever further ahead, until none of them is past it.
    """
    sources = ask(step)
    lead = 1
    while step == LATEST and len(steps := {source.manifest.step for source in sources}) > 1:
        if lead > _LARGEST_LEAD:
            raise RestoreError(f"expected sources that train together, got steps {sorted(steps)}")
        try:
            return ask(max(steps) + lead)
        except StepNotServedError as error:
            if not error.is_past:
                raise
            lead *= 2
            sources = ask(LATEST)
    return sources
