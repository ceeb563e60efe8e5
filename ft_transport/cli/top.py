"""``ft-transport top``: the whole job in a terminal, as it goes on."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ft_transport.cli.top_screen import is_well, screen
from ft_transport.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from ft_transport.http.job_watch import JobWatch
    from ft_transport.telemetry.job import JobState, KnownJob

_PERIOD_S: Final = 1.0
_LINES: Final = 24
_COLUMNS: Final = 80


def top_command(
    lighthouse: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="http://host:port of the job's Lighthouse (TORCHFT_LIGHTHOUSE).")
    ],
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON for each look, a line each.")] = False,
) -> None:
    """Watch the whole job in a terminal of 24 lines: replicas, steps, who serves whom, recoveries, errors.

    What needs attention comes first. q or Ctrl-C ends it. The Lighthouse says who is there, and each process is asked
    for what it tells; the job's token and certificates are taken from the environment. Exits with 1 if, in the last
    look, the Lighthouse could not be read, nobody was there, or somebody did not answer.
    """
    from rich.console import Console

    console = Console(highlight=False)
    watch = _watch(lighthouse)
    # Where nothing can be drawn over, each look is printed below the one before.
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


def _watch(lighthouse: str) -> JobWatch:
    from ft_transport.http.job_watch import JobWatch
    from ft_transport.http.rate_probe import connecting
    from ft_transport.settings import TransportSettings

    address = _checked(lighthouse)

    def find() -> KnownJob:
        from manager.quorum.job_members import known_job

        return known_job(address)

    settings = TransportSettings()
    return JobWatch(find, connecting(settings.keys(), settings.certificates()))


def _checked(lighthouse: str) -> str:
    from urllib.parse import urlsplit

    address = lighthouse if "://" in lighthouse else f"http://{lighthouse}"
    parts = urlsplit(address)
    try:
        is_whole = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ConfigurationError(f"expected http://host:port of a Lighthouse, got {lighthouse!r}")
    return address


def _live(watch: JobWatch, console: Console) -> JobState:
    from rich.live import Live

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
