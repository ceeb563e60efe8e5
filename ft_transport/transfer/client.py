"""Receiving states: of one peer in this rank's own layout, or of all ranks of a group in any other."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Generic, TypeVar, cast

from ft_transport.errors import ConfigurationError, FetchFailedError, SnapshotReplacedError, TransportError
from ft_transport.http.chunk_client import fetch_data
from ft_transport.http.connection import Connection, Progress, Timeouts
from ft_transport.http.fetch_pool import FetchSettings
from ft_transport.http.late_digests import digest_chunks, fetch_digests, find_damaged
from ft_transport.http.manifest_client import fetch_manifest
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.token import JobToken
from ft_transport.settings import TransportSettings, check_duration, check_number
from ft_transport.state.copying import default_num_threads
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction
from ft_transport.state.restore import Restore
from ft_transport.state.verify import find_differences
from ft_transport.transfer.sharded import ShardedRequest, poison, receive_sharded, step_of
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DEFAULT_NUM_CONNECTIONS: Final = 4
_GROUP_UNREACHABLE_TIMEOUT: Final = timedelta(seconds=5)
_FIRST_RESTART_PAUSE_S: Final = 0.05
_LONGEST_RESTART_PAUSE_S: Final = 1.0
_MAX_SHOWN_PATHS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[T]):
    """A state that arrived whole and verified, and the committed step that it shows.

    Attributes:
        step: The step.
        state: The state.
        num_bytes_fetched: How many bytes of data came over the network; ``None`` if they were not counted.
    """

    step: int
    state: T
    _manifest: Manifest
    num_bytes_fetched: int | None = None

    def differences(self, state: object) -> tuple[str, ...]:
        """Where ``state`` is not, bit for bit, what was sent; whatever load functions have made of it.

        Reads every byte of it once, and sends nothing.

        Args:
            state: The receiver's state after loading. Nothing may change it meanwhile.

        Returns:
            Paths, each with what differs; empty if nothing does.

        Raises:
            UnsupportedLeafError: A leaf of ``state`` has no safe encoding.
            ConfigurationError: It was fetched without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise ConfigurationError("expected a state that was fetched with is_comparable=True")
        return find_differences(self._manifest, state, num_threads=default_num_threads())


@dataclass(frozen=True, slots=True)
class _Present:
    """What lies in a destination before anything is received there."""

    restore: Restore

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """See ``http.chunk_client.Destination``; only to be read."""
        return self.restore.present(start, end)


class SnapshotReceiving(Generic[T]):
    """Receives what others serve. Thread-safe.

    Args:
        timeout: The default deadline.
        num_connections: Parallel connections; 0 takes 4.
        settings: Everything else.
        token: The job token, if the sources ask for one.
    """

    def __init__(
        self, timeout: timedelta, num_connections: int, settings: TransportSettings, token: JobToken | None
    ) -> None:
        self._timeout = timeout
        self._num_connections = num_connections or _DEFAULT_NUM_CONNECTIONS
        self._settings = settings
        self._token = token
        self._warned_paths: set[str] = set()
        self._warned_mutex = threading.Lock()

    def fetch(
        self,
        metadata: str,
        step: StepSelector = "latest",
        *,
        timeout: timedelta | None = None,
        unreachable_timeout: timedelta | None = None,
        progress_timeout: timedelta | None = None,
        into: object = None,
        check: Callable[[Incoming], None] | None = None,
        verify_late: bool = True,
        only_changed: bool = False,
    ) -> Received[T]:
        """Receives a state and says which step it shows.

        Args:
            metadata: What the peer's ``metadata()`` returned.
            step: A step, or ``latest``: the peer then takes a new snapshot if its state has moved on.
            timeout: For everything; the transport's own by default.
            unreachable_timeout: How long a peer may be out of reach before the first byte; by default ``timeout``, so
                that a receiver can start before its source.
            progress_timeout: Give up where no data comes for so long, at the start or in the middle, however much of
                ``timeout`` is left; by default only ``timeout`` ends it.
            into: The receiver's own state to receive into; its tensors must not be used until this returns. Where one
                has another dtype or shape than what comes, the received one is a new tensor; a warning names it once.
            check: Called with what will come, before any of it does; what it raises ends the fetch with ``into``
                untouched.
            verify_late: Whether digests that come after the data are compared. Turn it off for state that is compared
                by `Received.differences` anyway.
            only_changed: Compare what ``into`` holds with the digests first, and fetch only the chunks that differ: for
                weights of which little changes from version to version. It costs a look at every byte.

        Raises:
            TransportError: As for ``recv_checkpoint``. If bytes had landed in ``into`` they were overwritten with NaN
                patterns.
        """
        if timeout is None:
            timeout = self._timeout
        check_duration("timeout", timeout, at_least=timedelta.min)
        deadline_s = time.monotonic() + timeout.total_seconds()
        if step != LATEST:
            step = check_number("step", step, at_least=0)
        unreachable_s = (timeout if unreachable_timeout is None else unreachable_timeout).total_seconds()
        peer = PeerAddress.from_url(metadata)
        settings = self._fetch_settings(deadline_s, progress_timeout)

        def receive() -> Received[T]:
            with Connection(peer, token=settings.token, timeouts=settings.timeouts) as connection:
                manifest = fetch_manifest(connection, step, settings, unreachable_s=unreachable_s)
                settings.timeouts.note_progress()
                return self._receive(
                    connection, manifest, settings, into, check, verify_late=verify_late, only_changed=only_changed
                )

        return self._with_restarts(settings, receive)

    @staticmethod
    def _with_restarts(settings: FetchSettings, receive: Callable[[], Received[T]]) -> Received[T]:
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
                if not isinstance(last, SnapshotReplacedError):
                    raise
            # At once the first time, and then ever later, in case the peer says so of all that it serves.
            time.sleep(max(0.0, min(pause_s, settings.timeouts.end_s() - time.monotonic())))
            pause_s = min(max(_FIRST_RESTART_PAUSE_S, 2 * pause_s), _LONGEST_RESTART_PAUSE_S)

    def fetch_sharded(
        self,
        sources: Sequence[str],
        step: StepSelector = "latest",
        *,
        into: object = None,
        group_rank: int = 0,
        timeout: timedelta | None = None,
        unreachable_timeout: timedelta | None = None,
        progress_timeout: timedelta | None = None,
        check: Callable[[Incoming], None] | None = None,
        like: LikeFunction | None = None,
        is_comparable: bool = False,
    ) -> Received[T]:
        """Receives a state whose parts several ranks have, in the layout that this rank has; any other than theirs.

        Each DTensor of ``into`` says which part of a tensor is needed here. That part is fetched, from whichever ranks
        have it, each byte once. Parts that several ranks have (HSDP) are spread over them, and one of them stands in
        for another that fails. A plain tensor of ``into`` takes a whole one. The same path at two sources is the same
        tensor: states of pipeline stages need names, as ``torch.distributed.checkpoint.state_dict`` makes them.

        No collective runs: each rank of the receiving group calls this for itself. Where they have to end up at one
        step, they pass one (`common_step`): the latest may be another one for each.

        Args:
            sources: What the ``metadata()`` of each rank of the sending group returned; all of them, unless fewer have
                everything that is needed here.
            step: A step, or ``latest``: the same for all sources, although they do not reach it at one moment.
            into: This rank's own state. Its tensors must not be used until this returns. Without one, and without
                ``like``, all tensors come whole: what a consolidated checkpoint or an inference engine needs.
            group_rank: This rank's number in its group. What is not sharded comes from the source of that number
                (modulo their number), so that the ranks of a group do not all ask one source for it.
            timeout: For everything; the transport's own by default.
            unreachable_timeout: How long a source may be out of reach before the first byte; by default 5 seconds, or
                a quarter of ``timeout`` if that is less. Then the others are asked alone, if they have all that is
                needed; so they are if one hangs.
            progress_timeout: As for `fetch`.
            check: Called with what will come, before any of it does; what it raises ends the fetch with ``into``
                untouched.
            like: Returns, for the path of a tensor that ``into`` does not have, one of this rank's that is divided in
                the same way: for optimizers that have not stepped yet. By default tensors of the same shape and layout
                at the sources show how.
            is_comparable: Whether `Received.differences` will be called. It costs another look at every byte.

        Raises:
            RestoreError: The sources contradict each other, do not have all that is needed, or ``into`` does not show
                how something is to be divided; the path is named, and nothing was received.
            TransportError: As for `fetch`.
        """
        group_rank = check_number("group_rank", group_rank, at_least=0)
        request = self._sharded_request(
            sources, step, timeout, unreachable_timeout, first=group_rank, progress_timeout=progress_timeout
        )
        request = dataclasses.replace(request, into=into, like=like, check=check)
        return self._with_restarts(
            request.settings, lambda: self._receive_sharded(request, is_comparable=is_comparable)
        )

    def common_step(
        self,
        sources: Sequence[str],
        *,
        timeout: timedelta | None = None,
        unreachable_timeout: timedelta | None = None,
    ) -> int:
        """Has all sources take a snapshot of one step, and says which; it is served until newer ones take its place.

        For receivers that have to end up at one step: one of them calls this and tells the others, and all of them call
        `fetch_sharded` with that step.

        Args:
            sources: As for `fetch_sharded`, as are the timeouts.
            timeout: For everything.
            unreachable_timeout: How long a source may be out of reach.

        Raises:
            TransportError: As for `fetch_sharded`.
        """
        return step_of(self._sharded_request(sources, LATEST, timeout, unreachable_timeout, first=0))

    def _sharded_request(
        self,
        sources: Sequence[str],
        step: StepSelector,
        timeout: timedelta | None,
        unreachable_timeout: timedelta | None,
        *,
        first: int,
        progress_timeout: timedelta | None = None,
    ) -> ShardedRequest:
        if isinstance(sources, str) or not sources:
            raise ConfigurationError(f"expected the addresses of one or more sources, got {sources!r}")
        if timeout is None:
            timeout = self._timeout
        check_duration("timeout", timeout, at_least=timedelta.min)
        if step != LATEST:
            step = check_number("step", step, at_least=0)
        if unreachable_timeout is None:
            unreachable_timeout = min(timeout / 4, _GROUP_UNREACHABLE_TIMEOUT)
        peers = [PeerAddress.from_url(source) for source in sources]
        first %= len(peers)
        return ShardedRequest(
            sources=peers[first:] + peers[:first],
            step=step,
            settings=self._fetch_settings(time.monotonic() + timeout.total_seconds(), progress_timeout),
            unreachable_s=unreachable_timeout.total_seconds(),
            meshes=self._settings.meshes,
            max_bytes=self._settings.max_receive_bytes,
        )

    def _receive(
        self,
        connection: Connection,
        manifest: Manifest,
        settings: FetchSettings,
        into: object,
        check: Callable[[Incoming], None] | None,
        *,
        verify_late: bool,
        only_changed: bool,
    ) -> Received[T]:
        restore = Restore(manifest, into=into, meshes=self._settings.meshes, max_bytes=self._settings.max_receive_bytes)
        if check is not None:
            check(restore.incoming)
        self._warn_of_new_tensors(restore.incoming, str(connection.peer))

        def with_digests() -> Manifest:
            if manifest.digests is not None:
                return manifest
            digests = fetch_digests(connection, manifest, max_failures=settings.max_failures)
            return dataclasses.replace(manifest, digests=digests)

        try:
            chunks: Sequence[int] = range(manifest.chunks.num_chunks)
            if only_changed:
                manifest = with_digests()
                chunks = find_damaged(manifest, _Present(restore), num_threads=default_num_threads())
            settings.timeouts.note_progress()
            fetch_data([connection.peer], manifest, restore, settings, chunks=chunks)
            if manifest.digests is None:
                manifest = with_digests()
                if settings.verify and verify_late:
                    damaged = find_damaged(manifest, restore, num_threads=default_num_threads())
                    settings.timeouts.note_progress()
                    fetch_data([connection.peer], manifest, restore, settings, chunks=damaged)
            ranges = [manifest.chunks.range_of(chunk, chunk + 1) for chunk in chunks]
            return Received(
                step=manifest.step,
                state=cast(T, restore.finish()),
                _manifest=manifest,
                num_bytes_fetched=sum(end - start for start, end in ranges),
            )
        except BaseException as error:
            poison(restore, error)
            raise

    def _warn_of_new_tensors(self, incoming: Incoming, source: str) -> None:
        """Names the receiver's tensors that stay as they are because what comes does not fit them; each path once."""
        with self._warned_mutex:
            new = [mismatch for mismatch in incoming.mismatches if mismatch.path not in self._warned_paths]
            self._warned_paths.update(mismatch.path for mismatch in new)
        if not new:
            return
        shown = "; ".join(
            f"{each.path} is {each.own} here and {each.received} there" for each in new[:_MAX_SHOWN_PATHS]
        )
        more = f"; and {len(new) - _MAX_SHOWN_PATHS} more" if len(new) > _MAX_SHOWN_PATHS else ""
        logger.warning(
            "step %d from %s: the received state has new tensors where the receiver's own do not fit, and those stay "
            "as they are (%d): %s%s",
            incoming.step,
            source,
            len(new),
            shown,
            more,
        )

    def _receive_sharded(self, request: ShardedRequest, *, is_comparable: bool) -> Received[T]:
        manifest, restore = receive_sharded(request)
        self._warn_of_new_tensors(restore.incoming, ", ".join(map(str, request.sources)))
        try:
            if is_comparable:
                digests = digest_chunks(manifest, restore, num_threads=default_num_threads())
                manifest = dataclasses.replace(manifest, digests=tuple(digests))
            return Received(step=manifest.step, state=cast(T, restore.finish()), _manifest=manifest)
        except BaseException as error:
            poison(restore, error)
            raise

    def _fetch_settings(self, deadline_s: float, progress_timeout: timedelta | None = None) -> FetchSettings:
        settings = self._settings
        return FetchSettings(
            num_connections=self._num_connections,
            verify=settings.verify,
            max_failures=settings.max_failures,
            token=self._token,
            timeouts=Timeouts(
                deadline_s=deadline_s,
                connect_timeout_s=settings.connect_timeout.total_seconds(),
                stall_timeout_s=settings.stall_timeout.total_seconds(),
                min_bytes_per_s=settings.min_bytes_per_s,
                progress=Progress(progress_timeout.total_seconds()) if progress_timeout is not None else None,
            ),
            on_progress=settings.on_progress,
        )
