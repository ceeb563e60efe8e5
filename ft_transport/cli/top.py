"""``ft-transport top``, the whole job, live, in a terminal or on a page; ``watch-token``, the password of pages."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
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
from ft_transport.settings import TransportSettings
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder

_PERIOD_S: Final = 1.0
_STALL: Final = timedelta(seconds=20)
_LINES: Final = 24
_COLUMNS: Final = 80


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
            with _interruptible() as interrupted:
                time.sleep(max(_PERIOD_S, job.took_s))
                job = watch.look()
            if interrupted:
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
    """Serves the job as the state of a server that has no snapshot, with the access rules of a replica's page."""
    settings = TransportSettings(
        host=host, port=port, advertise=host, replica="ft-transport top", stall_timeout=_STALL, same_host=False
    )
    told = ProcessStatus(Recorder())
    told.set_part("job", watch.recent)
    server = SnapshotServer(
        SnapshotCache(max_snapshots=1, lease_s=0.0, contended_bytes_per_s=1.0, clock=time.monotonic),
        settings,
        keys=settings.keys(),
        certificates=settings.certificates(),
        max_wait_s=0.0,
        process_status=told,
    )
    try:
        typer.echo(f"the job is at {server.address}/")
        with _interruptible():
            while True:
                time.sleep(_PERIOD_S)
    finally:
        server.close(wait=True)


def _live(watch: JobWatch, console: Console) -> JobState:

    job = watch.look()
    with (
        _interruptible(),
        _keys() as pressed,
        Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        while True:
            live.update(screen(job, width=console.width, height=min(console.height, _LINES)), refresh=True)
            if pressed.waits_for_q(max(_PERIOD_S, job.took_s)):
                break
            job = watch.look()
    return job


@contextlib.contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Ctrl-C ends what is inside, and nothing else."""
    interrupted: list[bool] = []
    try:
        yield interrupted
    except KeyboardInterrupt:
        interrupted.append(True)


class _Keys:
    """Hears keys, where there is a keyboard."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def waits_for_q(self, seconds: float) -> bool:
        """Wait so long; whether q was pressed."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left_s)
                break
            if select.select([self._descriptor], [], [], left_s)[0]:
                pressed = os.read(self._descriptor, 64)
                if not pressed:
                    self._descriptor = None
                elif b"q" in pressed.lower():
                    return True
        return False


@contextlib.contextmanager
def _keys() -> Iterator[_Keys]:
    """The keyboard, key by key and without an echo; as it was before afterwards."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
