"""``ft-transport top``: the whole job, live, in a terminal or on a page; ``watch-token``: the password of pages."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from ft_transport.cli.job import JobFinder, JobState
from ft_transport.cli.job_watch import JobWatch
from ft_transport.cli.top_screen import is_well, screen
from ft_transport.http.client.rate_probe import connecting
from ft_transport.http.server.server import SnapshotServer
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.settings import Limits, TransportSettings
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder

_PERIOD_S: Final = 1.0
_LINES: Final = 24


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
