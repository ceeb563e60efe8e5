"""The client side of torchft's Lighthouse, which forms the quorums. The only module that imports torchft.

The Lighthouse (torchft's ``src/lighthouse.rs``) is one server for the whole job. A replica that is ready for a step
asks it for a quorum. The Lighthouse answers when all replicas that send heartbeats have asked, and sends every
replica's report to all of them. It leaves out a replica that has sent no heartbeat for ``heartbeat_timeout_ms``.

From torchft this module uses the public low-level interface ``torchft.coordination``: ``LighthouseServer``,
``LighthouseClient``, and the heartbeats of ``ManagerServer``.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from ft_transport.credentials import Keys
from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.signal_safe import SafeEvent
from ft_transport.runtime.threads import outcome_of
from manager.errors import LighthouseUnavailableError, QuorumError, QuorumTimeoutError
from manager.quorum.heartbeat import Heartbeat
from manager.quorum.members import SignedReports, name_of, read_status
from manager.quorum.reports import Member
from manager.quorum.stand_in import StandIn, has_left

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.1
_INSTALL: Final = (
    "expected torchft, which brings the Lighthouse, for a quorum: pip install 'ft-transport[torchft]'; "
    "its wheels are for Linux x86-64 with Python 3.10 to 3.13, "
    f"this is {platform.system()} {platform.machine()} with Python {platform.python_version()}"
)

_LOG_LEVEL: Final = "RUST_LOG"

_own_random = random.Random()
"""Separate from the random generator of the process: requests to a server must not change the trainer's numbers."""

_embedded: list[Any] = []
_embedded_mutex = threading.Lock()


def embedded_lighthouse(
    *,
    min_replicas: int = 1,
    heartbeat_timeout: timedelta = timedelta(seconds=1),
    join_timeout: timedelta = timedelta(seconds=80),
) -> str:
    """Start a Lighthouse inside this process, and return its address. It ends with the process.

    All callers in a process share one Lighthouse. Other processes on this machine can reach it at its address.

    Args:
        min_replicas: The smallest number of replicas that form the first quorum.
        heartbeat_timeout: The Lighthouse declares a replica dead after this time without a heartbeat.
        join_timeout: The Lighthouse waits this long for replicas that send heartbeats but have not asked for a quorum.
            This must be longer than a failed step. Otherwise replicas that have just started would train without the
            only replica that has the state.

    Raises:
        LighthouseUnavailableError: torchft is not installed, or the server cannot start.
    """
    coordination = _coordination()
    with _embedded_mutex:
        if not _embedded:
            try:
                with _typed_panics():
                    server = coordination.LighthouseServer(
                        bind="127.0.0.1:0",
                        min_replicas=min_replicas,
                        join_timeout_ms=round(join_timeout / timedelta(milliseconds=1)),
                        quorum_tick_ms=20,
                        heartbeat_timeout_ms=round(heartbeat_timeout / timedelta(milliseconds=1)),
                    )
            except (RuntimeError, OSError) as error:
                raise LighthouseUnavailableError(f"expected to start a Lighthouse on 127.0.0.1: {error}") from error
            _embedded.append(server)
        # The server's own address has this host's name, which may not resolve to the loopback interface.
        return f"http://127.0.0.1:{urlsplit(_embedded[0].address()).port}"


@contextmanager
def _typed_panics() -> Iterator[None]:
    """Convert a panic of torchft's Rust code, which is not an ``Exception``, into an error of the manager."""
    try:
        yield
    except BaseException as error:
        # PyO3 creates the class at run time, so it cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise QuorumError(
            f"expected torchft to talk to the Lighthouse, but its Rust code panicked: {error}; check that this process "
            "has descriptors, threads and memory left, and that all timeouts are finite"
        ) from error


class LighthouseSession:
    """Sends one replica's requests and heartbeats to the Lighthouse, until `close`.

    A restarted Lighthouse has forgotten all replicas, and forms a quorum of the first ones that ask. So the job could
    split into two halves with different states of the same step. To prevent that, the session checks each quorum that
    follows an outage of the Lighthouse, or that has a lower number than the last quorum. If a member of the last quorum
    is missing in it, the session asks again, until the call of `quorum` times out.

    Args:
        address: ``http://host:port`` of the Lighthouse.
        replica_id: The replica's id, which is unique to this start of the replica.
        connect_timeout: Limit of one attempt to connect.
        heartbeat_interval: Time between two heartbeats.
        heartbeat_timeout: The Lighthouse declares a replica dead after this time without a heartbeat.
        keys: The keys of the job token; ``None`` without a token. Replicas that do not prove the token are ignored.
        min_replicas: The smallest number of replicas that can commit a step.
        stand_in: Asks in this replica's place if this process dies; ``None`` if no other replica waits for this one.
        starts_heartbeat: Whether to send heartbeats at once. If not, they begin with the first request.

    Raises:
        LighthouseUnavailableError: torchft is not installed, or the Lighthouse does not answer.
    """

    def __init__(
        self,
        address: str,
        replica_id: str,
        *,
        connect_timeout: timedelta,
        heartbeat_interval: timedelta,
        heartbeat_timeout: timedelta,
        keys: Keys | None,
        min_replicas: int,
        stand_in: StandIn | None,
        starts_heartbeat: bool = True,
    ) -> None:
        self._reports = SignedReports(keys)
        self._address = address
        self._replica_id = replica_id
        self._connect_timeout = connect_timeout
        self._heartbeat_interval = heartbeat_interval
        self._closed = SafeEvent()
        self._min_replicas = min_replicas
        self._stand_in = stand_in
        self._quorum_id = -1
        self._members: frozenset[str] = frozenset()
        self._is_suspect = False
        self._heartbeat_client = self._connect(connect_timeout)
        self._client: Any = self._heartbeat_client
        self._heartbeat_timeout = heartbeat_timeout
        self._heartbeat: Heartbeat | None = self._start_heartbeat() if starts_heartbeat else None

    def quorum(
        self, member: Member, *, timeout: timedelta, deadline: Deadline, shrink_only: bool, num_retries: int
    ) -> tuple[Member, ...]:
        """Ask for a quorum, wait for it, and return the reports of its members.

        Args:
            member: This replica's report.
            timeout: Limit of one request, including retries if the Lighthouse is unreachable.
            deadline: Limit of the whole call.
            shrink_only: Whether to admit only members of the last quorum.
            num_retries: How often to ask again after a request has timed out.

        Raises:
            LighthouseUnavailableError: The Lighthouse was unreachable until the timeout.
            QuorumTimeoutError: No quorum was formed in time.
            QuorumError: A report is invalid, or the members have different job tokens.
        """
        if self._stand_in is not None:
            self._stand_in.arrive()
        heartbeat = self._heartbeat = self._heartbeat or self._start_heartbeat()
        began_s = time.monotonic()
        num_asked = 0
        reasons: list[str] = []
        for _ in range(num_retries + 1):
            if reasons and deadline.is_over():
                break
            num_asked += 1
            deadline_s = time.monotonic() + deadline.cap(timeout).total_seconds()
            pause_s = _FIRST_PAUSE_S
            while (remaining_s := deadline_s - time.monotonic()) > 0:
                try:
                    quorum = self._ask(member, timedelta(seconds=remaining_s), shrink_only)
                except LighthouseUnavailableError as error:
                    reasons.append(str(error))
                    self._client = None
                    self._is_suspect = True
                    logger.warning("%s failed, asking again: %s", self._name(), reasons[-1])
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    self._pause(min(pause_s * _own_random.uniform(0.5, 1.0), max(0.0, deadline_s - time.monotonic())))
                    continue
                if isinstance(quorum, TimeoutError):
                    reasons.append(self.missing() or str(quorum))
                    break
                left = [each.replica_id for each in quorum.participants if has_left(each)]
                participants = [each for each in quorum.participants if each.replica_id not in left]
                if left and (lacking := self._lacking(participants)):
                    reasons.append(lacking)
                    self._pause(min(_ASK_AGAIN_S, max(0.0, deadline_s - time.monotonic())))
                    continue
                members = self._reports.members_of(participants, self._replica_id)
                missing = self._missing(quorum.quorum_id, members, left)
                if missing and time.monotonic() + _ASK_AGAIN_S < deadline_s:
                    ids = [each.replica_id for each in members]
                    logger.warning("%s may have been restarted: the quorum of %s lacks %s", self._name(), ids, missing)
                    self._pause(_ASK_AGAIN_S)
                    continue
                self._quorum_id = quorum.quorum_id
                self._members = frozenset(each.replica_id for each in members)
                self._is_suspect = heartbeat.was_unreachable = False
                return members
        error_type = QuorumTimeoutError if self._client is not None else LighthouseUnavailableError
        waited_s = time.monotonic() - began_s
        raise error_type(
            f"{self._name()}: expected a quorum, got none in {waited_s:.1f} s, asked {num_asked} times; "
            f"the last answer: {reasons[-1] if reasons else 'none'}"
        )

    @property
    def has_heartbeat(self) -> bool:
        """Whether this replica sends heartbeats, so that other replicas wait for it."""
        return self._heartbeat is not None

    @property
    def was_unreachable(self) -> bool:
        """Whether the Lighthouse has been unreachable since the last quorum."""
        heartbeat = self._heartbeat
        return self._is_suspect or (heartbeat is not None and heartbeat.was_unreachable)

    def missing(self) -> str:
        """Describe which replicas the quorum waits for; empty if the Lighthouse's status page is unreadable."""
        status = read_status(self._address)
        return status.missing(self._replica_id) if status is not None else ""

    def num_missed_heartbeats(self) -> int:
        """Return how often the Lighthouse may have declared this replica dead, because no heartbeats arrived."""
        return self._heartbeat.missed_heartbeats.count() if self._heartbeat is not None else 0

    def stop_heartbeats(self) -> None:
        """Leave until the next call of `quorum`: other replicas no longer wait for this one."""
        if self._stand_in is not None:
            self._stand_in.leave()
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.close()

    def close(self) -> None:
        """Leave the job: other replicas no longer wait for this one."""
        self._closed.set()
        if self._stand_in is not None:
            self._stand_in.leave()
        if self._heartbeat is not None:
            self._heartbeat.close()
        # A client frees its threads and sockets with the last reference to it.
        self._heartbeat_client = self._client = None

    def _start_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            start=self._start_native_heartbeat,
            beat=self._beat,
            name=self._name(),
            interval=self._heartbeat_interval,
            timeout=self._heartbeat_timeout,
        )

    def _start_native_heartbeat(self) -> Any:
        try:
            with _typed_panics():
                return _coordination().ManagerServer(
                    replica_id=self._replica_id,
                    lighthouse_addr=self._address,
                    # This server could also serve torchft's managers, which this replica does not have.
                    hostname="127.0.0.1",
                    bind="127.0.0.1:0",
                    store_addr="",
                    world_size=1,
                    heartbeat_interval=self._heartbeat_interval,
                    connect_timeout=self._connect_timeout,
                    quorum_retries=0,
                )
        except (RuntimeError, OSError) as error:
            raise LighthouseUnavailableError(
                f"expected to send heartbeats to the Lighthouse at {self._address}: {error}"
            ) from error

    def _beat(self, timeout: timedelta) -> None:
        if self._stand_in is not None:
            self._stand_in.check()
        with _typed_panics():
            self._heartbeat_client.heartbeat(self._replica_id, timeout=timeout)

    def _connect(self, timeout: timedelta) -> Any:
        coordination = _coordination()
        client = outcome_of(_typed_panics()(partial(coordination.LighthouseClient, self._address, timeout)))
        if isinstance(client, (RuntimeError, OSError)):
            raise LighthouseUnavailableError(
                f"expected a Lighthouse at {self._address} within {timeout.total_seconds():g} s: {client}"
            ) from client
        if isinstance(client, Exception):
            raise client
        return client

    def _name(self) -> str:
        return f"replica {self._replica_id}: the Lighthouse at {self._address}"

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise QuorumError(f"replica {self._replica_id} has been shut down")

    def _lacking(self, participants: Sequence[Any]) -> str:
        """Return what a quorum lacks because replicas have left; empty if it lacks nothing."""
        if all(each.replica_id != self._replica_id for each in participants):
            # The last request of the keeper arrived together with the first one of this process.
            return "the quorum counts this replica as dead"
        if len(participants) < self._min_replicas:
            return f"expected at least {self._min_replicas} replicas, but all except {len(participants)} have left"
        return ""

    def _missing(self, quorum_id: int, members: Sequence[Member], left: Sequence[str]) -> list[str]:
        """Return which members of the last quorum are missing; none unless the Lighthouse may have been restarted.

        Args:
            quorum_id: Number of the quorum.
            members: The members of the quorum.
            left: The ids of replicas that are dead or have left.
        """
        names = {name_of(member.replica_id) for member in members}
        # By name, because a restarted replica has another id.
        missing = sorted(replica_id for replica_id in self._members if name_of(replica_id) not in names)
        starts_again = quorum_id < self._quorum_id or (quorum_id == self._quorum_id and not set(missing) <= set(left))
        return missing if self.was_unreachable or starts_again else []

    def _ask(self, member: Member, timeout: timedelta, shrink_only: bool) -> Any:
        """Send one request, and return the quorum; if the Lighthouse does not answer, return the ``TimeoutError``."""
        client = self._client
        if self._closed.is_set():
            raise QuorumError(f"replica {self._replica_id} has been shut down")
        if client is None:
            client = self._client = self._connect(min(timeout, self._connect_timeout))
        assert self._heartbeat is not None, "the first request starts the heartbeats"
        missed_heartbeats = self._heartbeat.missed_heartbeats
        sign = missed_heartbeats.now()
        request = partial(
            client.quorum,
            replica_id=self._replica_id,
            timeout=timeout,
            # Newcomers read the addresses from the status page before their first quorum (`running_members`).
            address=" ".join(member.addresses),
            store_address=member.store_address,
            step=member.step,
            world_size=len(member.addresses),
            shrink_only=shrink_only,
            data=self._reports.data_of(member),
        )
        try:
            quorum = outcome_of(_typed_panics()(request))
        except BaseException:
            # A signal handler has raised, and the client still runs the request: make another client next time.
            self._client = None
            raise
        if isinstance(quorum, TimeoutError):
            # Returned and not raised, because a signal handler may raise an error of the same type.
            return quorum
        if isinstance(quorum, QuorumError):
            self._client = None
            raise quorum
        if isinstance(quorum, Exception):
            raise LighthouseUnavailableError(str(quorum)) from quorum
        missed_heartbeats.note(sign)
        return quorum


def _coordination() -> Any:
    # The Rust code reads its log level once, at import. Child processes must not inherit a level that is set here.
    is_level_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "error")
    try:
        from torchft import coordination  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise LighthouseUnavailableError(_INSTALL) from error
    finally:
        if not is_level_set:
            os.environ.pop(_LOG_LEVEL, None)
    return coordination
