"""``ft-transport top``: shows a running job in a terminal or on a page. ``watch-token``: prints the page's password."""

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
    once: Annotated[bool, typer.Option("--once", help="Show the job once, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line, per refresh.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Serve a page about the job to browsers.")] = False,
    host: Annotated[str, typer.Option("--host", help="With --serve: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="With --serve: the port, 0 for any.")] = 0,
) -> None:
    """Show a running job in a terminal of 24 lines: replicas, steps, transfers, recoveries, errors.

    Replicas that need attention are listed first. Press q or Ctrl-C to exit. The command finds the replicas through the
    Lighthouse or through one replica, and requests the state of each process. The job token and certificates come from
    the environment. Exits with 1 if, at the last refresh, the Lighthouse could not be read, no replica was found, or a
    process did not respond.

    With --serve, the command serves a page about the job to browsers until Ctrl-C. If the job has a token, browsers
    need the watch token.
    """
    if serve:
        _serve(_watch(address), host, port)
        return

    console = Console(highlight=False)
    watch = _watch(address)
    # In a pipe or a dumb terminal, print each refresh below the last one.
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


def watch_token_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the watch token, which is derived from the job token in the environment.

    The watch token is the password of pages and metrics (with any user name), and a bearer token for Prometheus. It
    allows its owner to see the job, but not to read states or to change anything. Exits with 1 if there is no job
    token.
    """
    keys = TransportSettings().keys()
    if keys is None:
        typer.echo("expected a job token in FT_TRANSPORT_TOKEN or FT_TRANSPORT_TOKEN_FILE, got none", err=True)
        raise typer.Exit(1)
    token = keys.watch_tokens()[0]
    typer.echo(msgspec.json.encode({"watch_token": token}) if as_json else token)


def _watch(address: str) -> JobWatch:
    settings = TransportSettings()
    connect = connecting(settings.keys(), settings.certificates())
    return JobWatch(JobFinder(address, connect), connect)


def _serve(watch: JobWatch, host: str, port: int) -> None:
    """Serve the page of the job until Ctrl-C, with the same access rules as the page of a replica."""
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
    """Wait, and return whether q was pressed. Without a terminal as input, wait for the whole time."""
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
    """Make the terminal pass on each key at once and without an echo; restore its mode on exit."""
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
    """Finds the replicas of a job. Each call takes one or two seconds. Not thread-safe.

    Given the address of a process, it requests the Lighthouse and the members of the last quorum from this process, and
    uses the last response after the process has exited.

    Args:
        address: ``host:port`` or URL of the Lighthouse, or of a process of the job.
        connect: Function that connects to a process.

    Raises:
        ConfigurationError: The address is malformed.
    """

    def __init__(self, address: str, connect: Connect) -> None:
        self._address = self._lighthouse = address if "://" in address else f"http://{address}"
        PeerAddress.from_url(self._address)
        self._connect = connect
        self._is_lighthouse = False
        self._members: tuple[MemberStatus, ...] = ()
        self._alone: tuple[KnownMember, ...] = ()

    def __call__(self) -> KnownJob:
        """Read the Lighthouse's page. If the given address is that of a process, read the process's state first."""
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
    """Combine the Lighthouse's page with the members of a quorum.

    Args:
        lighthouse: Address of the Lighthouse; empty for a job without one.
        status: The content of the Lighthouse's page, which is not authenticated; ``None`` if it cannot be read.
        members: The members of the last quorum, as a process reports them.
        alone: The process at the user's address, for a job without known members.
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
