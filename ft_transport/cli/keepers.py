"""``ft-transport keepers``: the keepers of this user's processes on this host, and the memory that they hold."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from msgspec import Struct

from ft_transport.cli.output import megabytes

_PROGRAM: Final = b"ft_transport.keeper.program"
_SNAPSHOT: Final = "/memfd:ft-transport-snapshot"
_BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks`` (``man 7 inode``)."""
_STATE, _PARENT, _START_TIME = 0, 1, 19
"""Positions in ``/proc/PID/stat``, counted from the state (``man 5 proc``)."""


class FoundKeeper(Struct, frozen=True, kw_only=True):
    """A keeper that runs on this host.

    Attributes:
        pid: Its process id.
        trainer_pid: The process id of its trainer.
        is_trainer_alive: Whether that trainer runs.
        num_snapshots: Number of kept snapshots.
        held_bytes: Memory of the kept snapshots, in bytes.
    """

    pid: int
    trainer_pid: int
    is_trainer_alive: bool
    num_snapshots: int
    held_bytes: int


def keepers_command(
    pids: Annotated[list[int] | None, typer.Argument(help="Process ids of keepers; by default all of yours.")] = None,
    end: Annotated[bool, typer.Option("--end", help="End the keepers whose trainers are dead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the keepers of your processes on this host, and the memory that they hold for restarted processes.

    With --end, the kept states of dead trainers are dropped, so that no restarted process resumes from them. Replicas
    that train may then wait once, for heartbeat_timeout, for a dead replica.
    """
    found = [keeper for keeper in find_keepers() if not pids or keeper.pid in pids]
    ended = [keeper for keeper in found if end and not keeper.is_trainer_alive]
    for keeper in ended:
        with suppress(ProcessLookupError):
            os.kill(keeper.pid, signal.SIGTERM)
    if as_json:
        typer.echo(json.dumps({"keepers": msgspec.to_builtins(found), "ended": [keeper.pid for keeper in ended]}))
        return
    for keeper in found:
        trainer = f"trainer {keeper.trainer_pid} {'runs' if keeper.is_trainer_alive else 'is dead'}"
        held = f"{keeper.num_snapshots} snapshots, {megabytes(keeper.held_bytes)}"
        typer.echo(f"keeper {keeper.pid}: {trainer}; {held}{'; ended' if keeper in ended else ''}")
    if not found:
        typer.echo("no such keeper of this user runs on this host")


def find_keepers() -> list[FoundKeeper]:
    """Return the keepers of this user, by process id. Needs the proc file system of Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            command = (path / "cmdline").read_bytes()
            if path.stat().st_uid != os.geteuid() or _PROGRAM not in command:
                continue
            trainer_pid = int(command.rstrip(b"\0").split(b"\0")[-1])
            # The trainer's own child only starts the keeper, and exits.
            if int(_fields_of(path)[_PARENT]) != trainer_pid:
                found.append(_keeper_at(path, trainer_pid))
    return sorted(found, key=lambda keeper: keeper.pid)


def _keeper_at(path: Path, trainer_pid: int) -> FoundKeeper:
    held = []
    for descriptor in (path / "fd").iterdir():
        with suppress(OSError):
            if os.readlink(descriptor).startswith(_SNAPSHOT):
                held.append(descriptor.stat().st_blocks * _BLOCK_BYTES)
    trainer = _start_of(Path(f"/proc/{trainer_pid}"))
    own = _start_of(path)
    return FoundKeeper(
        pid=int(path.name),
        trainer_pid=trainer_pid,
        # A process that began after the keeper has taken over the number.
        is_trainer_alive=trainer is not None and own is not None and trainer <= own,
        num_snapshots=len(held),
        held_bytes=sum(held),
    )


def _start_of(process: Path) -> int | None:
    """Return when a process began, in ticks since the start of the system; ``None`` if it is dead."""
    try:
        fields = _fields_of(process)
    except OSError:
        return None
    return int(fields[_START_TIME]) if fields[_STATE] not in "ZXx" else None


def _fields_of(process: Path) -> list[str]:
    return (process / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
