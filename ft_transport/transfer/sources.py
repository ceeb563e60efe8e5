"""Finds sources of a fetch that serve the same content, and restarts a fetch whose source replaces its snapshot."""

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
"""After the first manifest, the other sources have as much time as it took, but at least this."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_MAX_ASKED_AT_ONCE: Final = 16
_LARGEST_LEAD: Final = 1 << 16
_TICK_S: Final = 2.0
"""Interval at which slow sources must respond to a status request once another source has sent its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPeers:
    """The sources of a state, and the receivers that fetch the state at the same time.

    Attributes:
        sources: Addresses of the sources.
        receivers: Addresses of all receivers, including this receiver, in an order that is the same on all receivers;
            empty if this is the only receiver.
        own: Index of this receiver in ``receivers``.
    """

    sources: Sequence[PeerAddress]
    receivers: Sequence[PeerAddress] = ()
    own: int = 0

    @classmethod
    def of(cls, sources: str | Sequence[str], *, relays: Sequence[str], own: str) -> FetchPeers:
        """Parse the URLs that the caller of ``HTTPTransport.fetch`` passes.

        Args:
            sources: URL of one source, or URLs of several.
            relays: URLs of all receivers, in any order.
            own: URL of this receiver, which ``relays`` may contain.

        Raises:
            ConfigurationError: A URL is invalid.
        """
        addresses = [PeerAddress.from_url(sources)] if isinstance(sources, str) else peer_addresses(sources)
        if isinstance(relays, str) or not isinstance(relays, Collection):
            raise ConfigurationError(f"expected a sequence of addresses as relays, got {relays!r}")
        this = PeerAddress.from_url(own)
        others = {PeerAddress.from_url(each) for each in relays} - {this}
        if not others:
            return cls(sources=addresses)
        receivers = sorted({*others, this}, key=str)
        return cls(sources=addresses, receivers=receivers, own=receivers.index(this))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedSources:
    """One or several sources of a fetch that serve the same content.

    Attributes:
        manifest: Manifest of the first source.
        files: The snapshot's file at each source.
        connection: Connection to the first source. While it is open, each request makes the source keep its snapshot
            for the length of a lease.
        content: Id of the content; ``None`` for a single source without other receivers.
    """

    manifest: Manifest
    files: tuple[SourceFile, ...]
    connection: Connection
    content: ContentId | None = None

    def manifest_with_digests(self, settings: FetchSettings) -> Manifest:
        """Return the manifest with digests; request the digests from the first source if the manifest has none.

        Raises:
            TransportError: The source did not send the digests.
        """
        return with_digests(self.connection, self.manifest, max_failures=settings.max_failures)


def ask_sources(
    peers: Sequence[PeerAddress],
    step: StepSelector,
    settings: FetchSettings,
    connections: contextlib.ExitStack,
    *,
    is_relayed: bool = False,
    is_this_host_first: bool = False,
) -> AgreedSources:
    """Request manifests from all peers; return the peers that serve the newest step with the most common content.

    If two contents are equally common, all receivers choose the same content, even if they list the peers in different
    orders. The result leaves out peers with another content, and peers whose manifest arrives long after the first one;
    the log names these peers.

    Args:
        peers: Addresses of the peers.
        step: A step or ``latest``.
        settings: Settings of the fetch.
        connections: Stack that closes the connections to the peers.
        is_relayed: Whether other receivers fetch the same content. If so, the content needs an id even with one peer.
        is_this_host_first: Whether a peer on this host that lends its memory comes first in the result.

    Raises:
        FetchFailedError: No peer sent a manifest; the error has the failure of each peer.
        TransportError: The only peer failed.
    """
    if len(peers) == 1 and not is_relayed:
        connection = connections.enter_context(Connection.of(peers[0], settings))
        source = _source_at(connection, fetch_manifest(connection, step, settings))
        settings.timeouts.note_progress()
        return source
    opened = [connections.enter_context(Connection.of(peer, settings)) for peer in peers]
    served, failed = _ask_all(opened, step, settings)
    if not served:
        raise _failure(failed)
    for peer, error in failed.items():
        logger.warning("source %s is left out: %s", peer, error)
    newest = max(each.manifest.step for each in served)
    num_sources = Counter(each.content for each in served if each.manifest.step == newest)
    content = max(num_sources, key=lambda content: (num_sources[content], content))
    agreed = [each for each in served if each.content == content]
    if is_this_host_first:
        agreed.sort(key=lambda each: not is_on_this_host(each.connection))
    digest_name = agreed[0].manifest.digester.name
    for each in served:
        if each.content != content:
            # Digests depend on the job token, so snapshots before and after a change of the token cannot be compared.
            is_other_digest = each.manifest.step == newest and each.manifest.digester.name != digest_name
            logger.warning(
                "source %s is left out: expected step %d with content %s, which %d of %d sources serve, got step %d "
                "with content %s%s",
                each.connection.peer,
                newest,
                content,
                len(agreed),
                len(served),
                each.manifest.step,
                each.content,
                f"; its digests are {each.manifest.digester.name} in place of {digest_name}" if is_other_digest else "",
            )
    settings.timeouts.note_progress()
    return dataclasses.replace(agreed[0], files=tuple(file for each in agreed for file in each.files))


def _source_at(connection: Connection, manifest: Manifest, content: ContentId | None = None) -> AgreedSources:
    file = SourceFile.of(connection.peer, manifest)
    return AgreedSources(manifest=manifest, files=(file,), connection=connection, content=content)


def with_restarts(settings: FetchSettings, receive: Callable[[], R]) -> R:
    """Call ``receive``, and call it again if it fails because a source replaced the snapshot by a newer one."""
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
            # If an earlier attempt wrote to the receiver's tensors, the last error has to report that.
            error.destination_touched = touched = touched or error.destination_touched
            last = error.failures[-1] if isinstance(error, FetchFailedError) else error
            if isinstance(last, MessageDamagedError) and last.refusal is not None:
                last = last.refusal
            if not isinstance(last, SnapshotReplacedError):
                raise
            recording = current()
            if recording is not None:
                recording.retry(last, peer=last.peer or "")
        # The first restart is immediate. Later restarts wait longer and longer, in case the source always fails so.
        time.sleep(max(0.0, min(pause_s, settings.timeouts.end_s() - time.monotonic())))
        pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)


@contextlib.contextmanager
def asking(
    connections: Sequence[Connection], ask: Callable[[Connection], R], *, at_once: int
) -> Iterator[tuple[list[Future[R]], SimpleQueue[Future[R]]]]:
    """Call ``ask`` with each connection on ``at_once`` threads; yield the futures, and a queue of done futures.

    At the end of the block, interrupts the connections of unfinished calls, and waits for the threads to end.
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
) -> tuple[list[AgreedSources], dict[PeerAddress, BaseException]]:
    """Return the snapshots of the peers that answered, in the order of ``connections``, and the others' errors."""

    def ask(connection: Connection) -> AgreedSources:
        manifest = fetch_manifest(connection, step, settings)
        manifest = with_digests(connection, manifest, max_failures=settings.max_failures)
        return _source_at(connection, manifest, content_id(manifest))

    began_s = time.monotonic()
    until_s: float | None = None
    with asking(connections, ask, at_once=len(connections)) as (futures, answered):
        # This wait needs no timeout before the first result, because each connection has the deadline of the fetch.
        for _ in connections:
            try:
                done = answered.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except Empty:
                break
            if until_s is None and done.exception() is None:
                now_s = time.monotonic()
                until_s = now_s + max(_LEAST_WAIT_S, now_s - began_s)
        are_in_time = [each.done() for each in futures]
    served: list[AgreedSources] = []
    failed: dict[PeerAddress, BaseException] = {}
    for connection, each, is_in_time in zip(connections, futures, are_in_time, strict=True):
        error = each.exception()
        if is_in_time and error is None:
            served.append(each.result())
        elif error is not None and (is_in_time or not isinstance(error, TransportError)):
            failed[connection.peer] = error
        else:
            # The error of a peer that was reached only shows that this process interrupted the connection.
            why = f"; {error.message}" if isinstance(error, TransportError) and not connection.num_opened else ""
            failed[connection.peer] = PeerUnreachableError(
                f"timed out waiting for the manifest, which another source has sent{why}", peer=str(connection.peer)
            )
    return served, failed


def _failure(failed: Mapping[PeerAddress, BaseException]) -> BaseException:
    errors, peers = list(failed.values()), ", ".join(map(str, failed))
    failures = tuple(error for error in errors if isinstance(error, TransportError))
    if len(errors) == 1 or len(failures) < len(errors):
        return next((error for error in errors if not isinstance(error, TransportError)), errors[0])
    return FetchFailedError(f"expected a snapshot from one of {peers}, got none", failures=failures)


def common_step(sources: Sequence[PeerAddress], settings: FetchSettings) -> int:
    """Return a step that all reachable sources serve, close to their latest steps."""
    with ask_group(sources, LATEST, settings) as (answers, _):
        return answers[0].manifest.step


@contextlib.contextmanager
def ask_group(
    peers: Sequence[PeerAddress], step: StepSelector, settings: FetchSettings
) -> Iterator[tuple[list[Source], list[TransportError]]]:
    """Yield the reachable sources, with manifests of the same step, and the errors of the unreachable sources.

    Until the end of the block, the sources do not replace their snapshots, unless a lease ends earlier.
    """
    connections: dict[PeerAddress, Connection] = {}
    unreachable: dict[PeerAddress, TransportError] = {}

    def ask(step: StepSelector) -> list[Source]:
        # End the leases of snapshots from an earlier call: they would count towards the sources' max_snapshots.
        _close_all(connections)
        connections.update({peer: Connection.of(peer, settings) for peer in peers if peer not in unreachable})
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
                unreachable[peer] = error
        if all(peer in unreachable for peer in answers):
            raise next(iter(unreachable.values()))
        return [Source(peer, each.result()) for peer, each in answers.items() if peer not in unreachable]

    try:
        yield _of_one_step(ask, step), list(unreachable.values())
    finally:
        _close_all(connections)


def _close_all(connections: dict[PeerAddress, Connection]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _wait_for(
    asking: Mapping[PeerAddress, Future[Manifest]], answered: SimpleQueue[Future[Manifest]], settings: FetchSettings
) -> None:
    """Wait for the manifests of all sources, except those that are unreachable or stop responding.

    Raises:
        TransportError: A source failed in another way.
    """
    has_answer = False
    left = dict(asking)
    while left:
        try:
            done = answered.get(timeout=_TICK_S if has_answer else None)
        except Empty:
            # A source that only waits for its trainer's next step boundary responds to status requests meanwhile.
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
    """Ask the sources until all of them serve the same step, and return them.

    Each rank takes a snapshot at its own next step boundary, so the latest snapshots of the sources may have different
    steps. In this case, ask all sources for a later step. If a source is already past that step, ask further ahead.
    """
    sources = ask(step)
    lead = 1
    while step == LATEST and len(steps := {source.manifest.step for source in sources}) > 1:
        if lead > _LARGEST_LEAD:
            raise RestoreError(
                f"expected sources that reach a common step, got steps {sorted(steps)}; name the ranks of one replica"
            )
        try:
            return ask(max(steps) + lead)
        except StepNotServedError as error:
            if not error.is_past:
                raise
            lead *= 2
            sources = ask(LATEST)
    return sources
