"""Receives a state that is sharded over the ranks of a group, in any layout of this rank."""

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
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import fetch_manifest, fetch_server_id
from ft_transport.http.client.slices import Source, fetch_slices
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction, reshard
from ft_transport.state.restore import Restore
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

_MAX_ASKED_AT_ONCE: Final = 16
_LARGEST_LEAD: Final = 1 << 16
_TICK_S: Final = 2.0
"""Interval, once a source has answered, at which the others have to show that they are alive, and their time to
answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRequest:
    """The parameters of a fetch in another layout.

    Attributes:
        sources: The peers that have the state; unsharded tensors come from the first that has them.
        step: A step, or ``latest``.
        settings: Connections, deadlines and the like.
        into: The receiver's own state.
        like: See `reshard`.
        check: Called with the manifest's data before any data comes.
        is_comparable: Whether digests of the received data are computed.
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
    """Receive this rank's part of a state; see ``HTTPTransport.fetch_sharded``.

    Args:
        request: The parameters.
        meshes: For DTensors that the receiver does not have.
        max_bytes: Maximum size; more is refused.

    Returns:
        The manifest that a peer of this rank's layout would serve, without digests, and the memory that holds the
        state.

    Raises:
        TransportError: The fetch failed; data that had landed in ``into`` was overwritten with NaN patterns.
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
    """Return the common step of all sources that are asked for their latest state."""
    with _asked(sources, LATEST, settings) as (answers, _):
        return answers[0].manifest.step


def poison(restore: Restore, error: BaseException) -> None:
    """Overwrite the data that landed before ``error``, so that no trainer uses it."""
    if restore.destination_touched:
        # Errors of other packages, such as those of a device, need these attributes as well.
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
    """Yield all sources that answer, with their manifests of one step, and the errors of the others.

    As long as this is open, the sources keep their snapshots, for the time of a lease at least.
    """
    with ExitStack() as stack:
        connections: dict[PeerAddress, Connection] = {}
        stack.callback(_close_all, connections)
        gone: dict[PeerAddress, TransportError] = {}

        def ask(step: StepSelector) -> list[Source]:
            # The snapshot of the earlier request is not needed, and must not occupy its place.
            _close_all(connections)
            for peer in peers:
                if peer in gone:
                    continue
                connections[peer] = Connection.of(peer, settings)
            with SafeExecutor(min(len(connections), _MAX_ASKED_AT_ONCE), "ft-transport-manifest") as pool:
                asking = {
                    peer: pool.submit(fetch_manifest, connection, step, settings)
                    for peer, connection in connections.items()
                }
                try:
                    _wait_for(asking, settings)
                except BaseException:
                    # No thread waits for the others' answers, and the pool ends when they come.
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
                    # It gets no second request: the others have answered.
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
    """Wait until all sources have answered, but for those that are unreachable, or that stop responding.

    Raises:
        TransportError: The first error of another kind.
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
            # A source that waits for its trainer's step boundary responds meanwhile; one that hangs does not.
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
        with Connection.of(peer, dataclasses.replace(settings, timeouts=timeouts)) as connection:
            fetch_server_id(connection)
    except (PeerUnreachableError, DeadlineExceededError):
        return False
    except PeerError:
        return True
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
