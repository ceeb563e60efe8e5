"""``ft-transport top``: the whole job, live, in a terminal or on a page; ``watch-token``: the password of pages."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from ft_transport.cli.job import JobState, JobWatch, KnownJob, KnownMember
from ft_transport.cli.top_screen import is_well, screen
from ft_transport.errors import TransportError
from ft_transport.http.client.peer_status import Connect, ask_state, connecting
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.server.server import SnapshotServer
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.settings import Limits, TransportSettings
from ft_transport.telemetry.process_state import (
    ManagerStatus,
    MemberStatus,
    TransportStatus,
)
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder
from manager.quorum.members import LighthouseStatus, name_of, read_status

_PERIOD_S: Final = 1.0
_LINES: Final = 24
_STATUS_S: Final = 0.5
_STATE_S: Final = 1.0
_MAX_ADDRESSES: Final = 64


def top_command(
    address: Annotated[
        str,
        typer.Argument(help="http://host:port of the job's Lighthouse (TORCHFT_LIGHTHOUSE), or the URL of a replica."),
    ],
    *,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON for each look, a line each.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the job's page to browsers.")] = False,
    host: Annotated[str, typer.Option("--host", help="With --serve: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="With --serve: the port, 0 for any.")] = 0,
) -> None:
    """Watch the whole job in a terminal of 24 lines: replicas, steps, transfers, recoveries, errors.

    The replicas that need attention come first. q or Ctrl-C ends it. The Lighthouse, or a replica, names the replicas,
    and each process is asked for its state; the job's token and certificates come from the environment. Exits with 1
    if, in the last look, the Lighthouse could not be read, no replica was found, or a process did not answer.

    With --serve, browsers get the job's page, until Ctrl-C. Where there is a job token, they need the watch token.
    """
    if serve:
        _serve(_watch(address), host, port)
        return

    console = Console(highlight=False)
    watch = _watch(address)
    # A pipe or a dumb terminal gets each look below the one before.
    if as_json or once or not console.is_terminal or console.is_dumb_terminal:
        job = watch.look()
        while True:
            if as_json:
                typer.echo(msgspec.json.encode(job).decode())
            else:
                console.print(screen(job, width=console.width, height=_LINES))
                sys.stdout.flush()
            if once:
                break
            try:
                time.sleep(max(_PERIOD_S, job.took_s))
                job = watch.look()
            except KeyboardInterrupt:
                break
    else:
        job = _live(watch, console)
    if not is_well(job):
        raise typer.Exit(1)


def watch_token_command(as_json: Annotated[bool, typer.Option("--json", help="An object of JSON.")] = False) -> None:
    """Print the watch token of the job token that the environment names.

    It is the password, with any user name, of pages and metrics, and a bearer token for Prometheus. It shows the
    job, and gives no right to read a state or change anything. Exits with 1 if there is no token.
    """
    keys = TransportSettings().keys()
    if keys is None:
        typer.echo("the environment names no job token (FT_TRANSPORT_TOKEN, FT_TRANSPORT_TOKEN_FILE)", err=True)
        raise typer.Exit(1)
    token = keys.watch_tokens()[0]
    typer.echo(msgspec.json.encode({"watch_token": token}) if as_json else token)


def _watch(address: str) -> JobWatch:
    settings = TransportSettings()
    connect = connecting(settings.keys(), settings.certificates())
    return JobWatch(JobFinder(address, connect), connect)


def _serve(watch: JobWatch, host: str, port: int) -> None:
    """Serve the job as the state of a server that has no snapshot, with the access rules of a replica's page."""
    settings = TransportSettings(
        host=host,
        port=port,
        advertise=host,
        replica="ft-transport top",
        limits=Limits(stall_timeout=timedelta(seconds=20)),
        same_host=False,
    )
    status = ProcessStatus(Recorder())
    status.set_part("job", watch.recent)
    server = SnapshotServer(
        SnapshotCache(max_snapshots=1, lease_s=0.0, contended_bytes_per_s=1.0, clock=time.monotonic),
        settings,
        keys=settings.keys(),
        certificates=settings.certificates(),
        max_wait_s=0.0,
        process_status=status,
    )
    try:
        typer.echo(f"the job is at {server.address}/")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(_PERIOD_S)
    finally:
        server.close(wait=True)


def _live(watch: JobWatch, console: Console) -> JobState:
    job = watch.look()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _single_keys(),
        Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        while True:
            live.update(screen(job, width=console.width, height=min(console.height, _LINES)), refresh=True)
            if _waits_for_q(max(_PERIOD_S, job.took_s)):
                break
            job = watch.look()
    return job


def _waits_for_q(seconds: float) -> bool:
    """Wait so many seconds, or until q is pressed. Without a terminal as input it just waits."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        has_input = sys.stdin.isatty() and select.select([sys.stdin], [], [], left_s)[0]
        pressed = os.read(sys.stdin.fileno(), 64) if has_input else b""
        if b"q" in pressed.lower():
            return True
        if not pressed:
            time.sleep(max(0.0, until_s - time.monotonic()))
    return False


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Have the terminal pass on each key at once and without an echo, and restore its mode afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class JobFinder:
    """Finds the replicas again at each call, which takes a second or two. Not thread-safe.

    A process names its Lighthouse and the members of its last quorum. Both stay known after that process has exited.

    Args:
        address: ``host:port`` or URL of the Lighthouse, or of a process of the job.
        connect: Connects to a process.

    Raises:
        ConfigurationError: The address is of another form.
    """

    def __init__(self, address: str, connect: Connect) -> None:
        self._address = self._lighthouse = address if "://" in address else f"http://{address}"
        PeerAddress.from_url(self._address)
        self._connect = connect
        self._is_lighthouse = False
        self._members: tuple[MemberStatus, ...] = ()
        self._alone: tuple[KnownMember, ...] = ()

    def __call__(self) -> KnownJob:
        """Ask the process, unless the address turned out to be that of a Lighthouse, and then the Lighthouse."""
        if not self._is_lighthouse:
            self._ask_process()
        status = read_status(self._lighthouse, _STATUS_S) if self._lighthouse else None
        if status is not None and status.reason and self._lighthouse == self._address:
            self._is_lighthouse = True
        return job_of(self._lighthouse, status, self._members, self._alone)

    def _ask_process(self) -> None:
        try:
            state = ask_state(self._address, self._connect, _STATE_S)
        except TransportError:
            return
        manager = state.manager if state.manager is not None else ManagerStatus()
        self._lighthouse, self._members = manager.lighthouse, manager.members
        transport = state.transport if state.transport is not None else TransportStatus()
        name = manager.replica_id or transport.replica
        self._alone = (KnownMember(name=name_of(name) or "the process", replica_id=name, addresses=(self._address,)),)


def job_of(
    lighthouse: str,
    status: LighthouseStatus | None,
    members: Sequence[MemberStatus],
    alone: tuple[KnownMember, ...] = (),
) -> KnownJob:
    """Join the Lighthouse's page with the members of a quorum.

    Args:
        lighthouse: Its address; empty for a job without one.
        status: Its page's text; ``None`` if it cannot be read. The addresses there are not authenticated.
        members: The members of a process's last quorum.
        alone: A process that has been in no quorum.
    """
    page = status if status is not None else LighthouseStatus(reason="", num_asking=None, alive=(), silent=())
    addresses = {each.replica_id: each.addresses for each in page.members}
    addresses.update({each.replica_id: each.addresses for each in members})
    steps = {each.replica_id: each.step for each in members}
    steps.update({each.replica_id: each.step for each in page.members})
    silent_s = dict(page.silent)
    found = tuple(
        KnownMember(
            name=name_of(replica_id),
            replica_id=replica_id,
            addresses=addresses.get(replica_id, ())[:_MAX_ADDRESSES],
            step=steps.get(replica_id),
            silent_s=silent_s.get(replica_id),
        )
        for replica_id in dict.fromkeys([*addresses, *page.alive, *silent_s])
    )
    return KnownJob(
        members=found or alone, lighthouse=lighthouse, status=page.reason, is_lighthouse_read=status is not None
    )
