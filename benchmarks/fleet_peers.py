"""Programs that pass files on among receivers, as others have made them: shardcast's tree and libtorrent's swarm.

They run in an environment of their own (``make bench-fleet`` makes it), with files in memory. What they do before a
transfer begins is not measured: pieces are cut and digested, and everybody has been told of everybody.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet_runs import TIMEOUT_S, Member, Outcome, run
from benchmarks.network_namespaces import Host, Network
from benchmarks.replicas.fleet_hosts import Done
from benchmarks.report import Role

PYTHON_VARIABLE: Final = "FLEET_PEERS_PYTHON"
"""Environment variable: the interpreter of the environment that has the peers."""
_PROGRAMS: Final = Path(__file__).resolve().parent / "replicas"
_NUM_MIDDLE: Final = 2
_SHARDCAST_PORT: Final = 8000
_SHOWN_CHARACTERS: Final = 2000


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to compare with.

    Attributes:
        module: What it imports.
        tools: Programs that it runs.
        measure: Moves a file once to some hosts from the first one.
    """

    name: str
    module: str
    tools: tuple[str, ...]
    measure: Callable[[Network, int, Path, Path], Outcome]
    role: Role = "peer"

    def why_not(self) -> str | None:
        """Why it is not measured, or ``None``."""
        python = os.environ.get(PYTHON_VARIABLE)
        if python is None or not Path(python).exists():
            return f"{self.name}: not measured without its environment ({PYTHON_VARIABLE}, which make bench-fleet sets)"
        done = subprocess.run([python, "-c", f"import {self.module}"], check=False, capture_output=True)
        if done.returncode != 0:
            return f"{self.name}: not measured, for it could not be installed"
        missing = [tool for tool in self.tools if shutil.which(tool) is None]
        return f"{self.name}: not measured, for it needs {' and '.join(missing)}" if missing else None


class Program:
    """A process in another environment that takes and gives lines of JSON."""

    def __init__(self, host: Host, program: str, *arguments: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            host.command(os.environ[PYTHON_VARIABLE], str(_PROGRAMS / program), *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def say(self, message: object) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Its next line; with ``file`` and ``ended_s``, as what a receiver says."""
        assert self._process.stdout is not None, "it is a pipe"
        # One line answers each that was said, so nothing is left in the buffer.
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._log.seek(0)
            printed = self._log.read()[-_SHOWN_CHARACTERS:]
            raise RuntimeError(f"expected a message of {self._process.args!r} within {timeout_s:.0f} s:\n{printed}")
        message = json.loads(line)
        if "ended_s" not in message:
            return message
        return Done(ended_s=message["ended_s"], file=message["file"])

    def close(self) -> None:
        # ``ip netns exec`` becomes the program itself.
        self._process.kill()
        self._process.communicate()
        self._log.close()


def digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _measure_torrent(network: Network, num_receivers: int, data: Path, directory: Path) -> Outcome:
    source, *hosts = network.hosts[: num_receivers + 1]
    with contextlib.ExitStack() as stack:
        seed = _program(stack, source, "torrent_host.py", str(directory), source.address, str(data))
        torrent = seed.receive()["torrent"]
        members: dict[Host, Member] = {}
        for host in hosts:
            members[host] = _program(stack, host, "torrent_host.py", str(_own(directory, host)), host.address)
        for member in members.values():
            member.receive()
        order = {"torrent": torrent, "peers": [host.address for host in (source, *hosts)]}
        return _checked(run(network, members, dict.fromkeys(members, order)), data)


def _measure_shardcast(network: Network, num_receivers: int, data: Path, directory: Path) -> Outcome:
    source, *hosts = network.hosts[: num_receivers + 1]
    middle = hosts[: min(_NUM_MIDDLE, num_receivers)]
    with contextlib.ExitStack() as stack:
        origin = _program(stack, source, "shardcast_host.py", "origin", str(_own(directory, source)))
        origin.receive()
        members: dict[Host, Member] = {}
        for host in hosts:
            upstream = [source] if host in middle else middle
            urls = [f"http://{each.address}:{_SHARDCAST_PORT}" for each in upstream]
            role = "middle" if host in middle else "client"
            members[host] = _program(stack, host, "shardcast_host.py", role, str(_own(directory, host)), *urls)
            # One after the other: all of them try a server with the same file in /tmp.
            members[host].receive()
        origin.say({"file": str(data)})
        origin.receive()
        for host in middle:
            members[host].say({})
            members[host].receive()
        return _checked(run(network, members, {host: {} for host in members}), data)


def _program(stack: contextlib.ExitStack, host: Host, name: str, *arguments: str) -> Program:
    program = Program(host, name, *arguments)
    stack.callback(program.close)
    return program


def _own(directory: Path, host: Host) -> Path:
    own = directory / host.namespace
    own.mkdir()
    return own


def _checked(outcome: Outcome, data: Path) -> Outcome:
    expected = digest_of_file(data)
    if any(done.file is None or digest_of_file(Path(done.file)) != expected for done in outcome.done.values()):
        raise RuntimeError("a peer delivered another file than was sent")
    return outcome


@contextlib.contextmanager
def file_of(content: Sequence[memoryview]) -> Iterator[Path]:
    """The bytes of a state as a file in memory, in a directory of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fleet-") as directory:
        path = Path(directory) / "state.bin"
        with path.open("wb") as file:
            file.writelines(content)
        yield path


def measure(peer: Peer, network: Network, num_receivers: int, data: Path) -> Outcome:
    """Moves a file to the first hosts once, and removes what came."""
    with tempfile.TemporaryDirectory(dir=data.parent) as directory:
        return peer.measure(network, num_receivers, data, Path(directory))


SHARDCAST: Final = Peer("shardcast, 2 middle nodes", "shardcast", ("wget",), _measure_shardcast)
LIBTORRENT: Final = Peer("libtorrent", "libtorrent", (), _measure_torrent)
PEERS: Final = (SHARDCAST, LIBTORRENT)
