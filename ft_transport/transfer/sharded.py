"""Receiving a state whose parts are spread over the ranks of a group, in whatever layout this rank has."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import (
    DeadlineExceededError,
    PeerError,
    PeerUnreachableError,
    RestoreError,
    StepNotServedError,
    TransportError,
)
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.http.manifest_client import fetch_manifest, fetch_server_id
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.slice_client import Source, fetch_slices
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction, reshard
from ft_transport.state.restore import Restore
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

_MAX_ASKED_AT_ONCE: Final = 16
_LARGEST_LEAD: Final = 1 << 16
_TICK_S: Final = 2.0
"""Once a source has answered, the others are asked so often whether they are alive, and have so long to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRequest:
    """What to receive, and how.

    Attributes:
        sources: Who has it; what is not sharded comes from the first that has it.
        step: A step, or ``latest``.
        settings: Connections, deadlines and the like.
        into: The receiver's own state.
        like: See `reshard`.
        check: Called with what will come, before any of it does.
        is_comparable: Whether digests of what was received are computed.
    """

    sources: Sequence[PeerAddress]
    step: StepSelector
    settings: FetchSettings
    into: object
    like: LikeFunction | None
    check: Callable[[Incoming], None] | None
    is_comparable: bool


def receive_sharded(
    request: ShardedRequest, *, meshes: Sequence[DeviceMesh], max_bytes: int
) -> tuple[Manifest, Restore]:
    """Receives what this rank needs; see ``HTTPTransport.fetch_sharded``.

    Args:
        request: What, from whom, and how.
        meshes: For DTensors that the receiver does not have.
        max_bytes: More than this is refused.

    Returns:
        What a peer of this rank's layout would have served, without digests, and the memory that holds it.

    Raises:
        TransportError: What had landed in ``into`` was overwritten with NaN patterns then.
    """
    with _asked(request.sources, request.step, request.settings) as (sources, unreachable):
        try:
            names = [str(source.peer) for source in sources]
            check_time = request.settings.timeouts.check_deadline
            manifests = [source.manifest for source in sources]
            resharding = reshard(manifests, request.into, like=request.like, names=names, check_time=check_time)
            restore = Restore(
                resharding.manifest, into=request.into, meshes=meshes, max_bytes=max_bytes, check_time=check_time
            )
            if request.check is not None:
                request.check(restore.incoming)
            try:
                fetch_slices(sources, resharding.wanted, restore, request.settings)
            except BaseException as error:
                poison(restore, error)
                raise
        except TransportError as error:
            error.step = error.step if error.step is not None else sources[0].manifest.step
            if unreachable:
                error.message += f"; out of reach: {', '.join(map(str, unreachable))}"
            raise
    return resharding.manifest, restore


def common_step(sources: Sequence[PeerAddress], settings: FetchSettings) -> int:
    """The step that all sources show when they are asked for their latest state, as one."""
    with _asked(sources, LATEST, settings) as (answers, _):
        return answers[0].manifest.step


def poison(restore: Restore, error: BaseException) -> None:
    """Makes sure that nobody trains on what has landed before ``error``."""
    if restore.destination_touched:
        # Errors that are not of this package, such as those of a device, have to say so as well.
        error.destination_touched = True  # type: ignore[attr-defined]
        try:
            restore.poison()
        except BaseException as another:
            another.destination_touched = True  # type: ignore[attr-defined]
            raise


@contextmanager
def _asked(
    peers: Sequence[PeerAddress], step: StepSelector, settings: FetchSettings
) -> Iterator[tuple[list[Source], list[TransportError]]]:
    """All sources that answer, with their manifests of one step; and why the others did not.

    As long as this is open, the sources keep their snapshots, for the time of a lease at least.
    """
    with ExitStack() as stack:
        connections: dict[PeerAddress, Connection] = {}
        stack.callback(_close_all, connections)
        gone: dict[PeerAddress, TransportError] = {}

        def ask(step: StepSelector) -> list[Source]:
            # What was asked for before is not needed, and must not keep its place.
            _close_all(connections)
            for peer in peers:
                if peer in gone:
                    continue
                connections[peer] = settings.connection_to(peer)
            with SafeExecutor(min(len(connections), _MAX_ASKED_AT_ONCE), "ft-transport-manifest") as pool:
                asking = {
                    peer: pool.submit(fetch_manifest, connection, step, settings)
                    for peer, connection in connections.items()
                }
                try:
                    _wait_for(asking, settings)
                except BaseException:
                    # Nobody waits for the others' answers, and the pool ends when they do.
                    for peer, each in asking.items():
                        each.cancel()
                        connections[peer].interrupt()
                    raise
                for peer, each in asking.items():
                    if not each.done():
                        connections[peer].interrupt()
            for peer, each in asking.items():
                error = each.exception()
                if isinstance(error, TransportError):
                    # It is not asked again: the others have answered.
                    gone[peer] = error
            if all(peer in gone for peer in asking):
                raise next(iter(gone.values()))
            return [Source(peer, each.result()) for peer, each in asking.items() if peer not in gone]

        yield _of_one_step(ask, step), list(gone.values())


def _close_all(connections: dict[PeerAddress, Connection]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _wait_for(asking: Mapping[PeerAddress, Future[Manifest]], settings: FetchSettings) -> None:
    """Returns when all have an answer, but for those that are out of reach, or that do not answer anything any more.

    Raises:
        TransportError: The first error that is another.
    """
    answered: SimpleQueue[Future[Manifest]] = SimpleQueue()
    for each in asking.values():
        each.add_done_callback(answered.put)
    has_answer = False
    left = dict(asking)
    while left:
        try:
            done = answered.get(timeout=_TICK_S if has_answer else None)
        except Empty:
            # One that waits for its trainer's step boundary answers meanwhile; one that hangs does not.
            left = {peer: each for peer, each in left.items() if _answers(peer, settings)}
            continue
        error = done.exception()
        if error is not None and not isinstance(error, PeerUnreachableError):
            raise error
        has_answer = has_answer or error is None
        left = {peer: each for peer, each in left.items() if each is not done}


def _answers(peer: PeerAddress, settings: FetchSettings) -> bool:
    timeouts = dataclasses.replace(
        settings.timeouts,
        deadline_s=min(settings.timeouts.deadline_s, time.monotonic() + _TICK_S),
    )
    try:
        with dataclasses.replace(settings, timeouts=timeouts).connection_to(peer) as connection:
            fetch_server_id(connection)
    except (PeerUnreachableError, DeadlineExceededError):
        return False
    except PeerError:
        return True
    return True


def _of_one_step(ask: Callable[[StepSelector], list[Source]], step: StepSelector) -> list[Source]:
    """Asks until all sources show one step.

    Each rank begins a snapshot at its own next step boundary, so those that are asked for their latest state may show
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
