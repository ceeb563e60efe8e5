"""Receiving a state whose parts are spread over the ranks of a group, in whatever layout this rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import RestoreError, StepNotServedError, TransportError
from ft_transport.net.asking import fetch_manifest
from ft_transport.net.connection import Connection
from ft_transport.net.peer_address import PeerAddress
from ft_transport.net.slice_client import Source, fetch_slices
from ft_transport.net.workers import FetchSettings
from ft_transport.tensors.matching import Incoming
from ft_transport.tensors.resharding import LikeFunction, reshard
from ft_transport.tensors.restore import Restore
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

_MAX_ASKED_AT_ONCE: Final = 16
_LARGEST_LEAD: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRequest:
    """What to receive, and how.

    Attributes:
        sources: Who has it; what is not sharded comes from the first that has it.
        step: A step, or ``latest``.
        into: The receiver's own state.
        settings: Connections, deadlines and the like.
        unreachable_s: How long a source may be out of reach before the first byte, in seconds.
        meshes: For DTensors that the receiver does not have.
        max_bytes: More than this is refused.
        like: See `reshard`.
        check: Called with what will come, before any of it does.
    """

    sources: Sequence[PeerAddress]
    step: StepSelector
    into: object
    settings: FetchSettings
    unreachable_s: float
    meshes: Sequence[DeviceMesh]
    max_bytes: int
    like: LikeFunction | None
    check: Callable[[Incoming], None] | None


def receive_sharded(request: ShardedRequest) -> tuple[Manifest, Restore]:
    """Receives what this rank needs; see ``HTTPTransport.fetch_sharded``.

    Returns:
        What a peer of this rank's layout would have served, without digests, and the memory that holds it.

    Raises:
        TransportError: What had landed in ``into`` was overwritten with NaN patterns then.
    """
    with _asked(request) as manifests:
        resharding = reshard(manifests, request.into, like=request.like)
        restore = Restore(resharding.manifest, into=request.into, meshes=request.meshes, max_bytes=request.max_bytes)
        if request.check is not None:
            request.check(restore.incoming)
        try:
            fetch_slices(
                [Source(peer, manifest) for peer, manifest in zip(request.sources, manifests, strict=True)],
                resharding.wanted,
                restore,
                request.settings,
            )
        except BaseException as error:
            poison(restore, error)
            raise
    return resharding.manifest, restore


def poison(restore: Restore, error: BaseException) -> None:
    """Makes sure that nobody trains on what has landed before ``error``."""
    if restore.destination_touched:
        restore.poison()
        if isinstance(error, TransportError):
            error.destination_touched = True


@contextmanager
def _asked(request: ShardedRequest) -> Iterator[list[Manifest]]:
    """The manifests of all sources, of one step; as long as this is open, the sources keep the snapshots."""
    settings = request.settings
    with ExitStack() as stack:
        connections = [
            stack.enter_context(Connection(source, token=settings.token, patience=settings.patience))
            for source in request.sources
        ]
        pool = stack.enter_context(
            ThreadPoolExecutor(min(len(connections), _MAX_ASKED_AT_ONCE), thread_name_prefix="ft-transport-manifest")
        )

        def ask(step: StepSelector) -> list[Manifest]:
            # What was asked for before is not needed, and must not keep its place.
            for connection in connections:
                connection.close()
            asking = [
                pool.submit(fetch_manifest, connection, step, settings, unreachable_s=request.unreachable_s)
                for connection in connections
            ]
            # All of them, also after a failure: each uses its connection until it has its answer.
            errors = [error for error in (each.exception() for each in asking) if error is not None]
            for error in sorted(errors, key=_is_past):
                raise error
            return [each.result() for each in asking]

        yield _of_one_step(ask, request.step)


def _is_past(error: BaseException) -> bool:
    return isinstance(error, StepNotServedError) and error.is_past


def _of_one_step(ask: Callable[[StepSelector], list[Manifest]], step: StepSelector) -> list[Manifest]:
    """Asks until all sources show one step.

    Each rank begins a snapshot at its own next step boundary, so those that are asked for their latest state may show
    neighbouring steps. Then all are asked for a step to come, ever further ahead, until none of them is past it.
    """
    manifests = ask(step)
    lead = 1
    while step == LATEST and len({manifest.step for manifest in manifests}) > 1:
        newest = max(manifest.step for manifest in manifests)
        if lead > _LARGEST_LEAD:
            raise RestoreError(
                f"expected sources that train together, got steps {sorted({manifest.step for manifest in manifests})}"
            )
        try:
            return ask(newest + lead)
        except StepNotServedError as error:
            if not _is_past(error):
                raise
            lead *= 2
            manifests = ask(LATEST)
    return manifests
