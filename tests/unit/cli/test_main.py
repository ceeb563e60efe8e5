"""How the command ends: wrong usage, nothing there, something else at a URL, an interruption; and its help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run as run_program
from quorum_threads import TIMEOUT, lighthouse
from scripted_peer import Peer, answering, scripted
from typer.testing import CliRunner

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.cli.main import app, main

Ended = tuple[int, str]
Run = Callable[..., Ended]

COMMANDS = ("bench", "diff", "doctor", "explain", "fetch", "inspect", "status", "top", "verify")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def ended(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ft-transport", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return int(end.value.code or 0), output.out + output.err

    return ended


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "nothing"], "expected a file of records at nothing: No such file"),
        (["trace", "nothing"], "expected a file of records at nothing: No such file"),
        (["trace", "records", "-o", "none/t.json"], "expected to write the trace"),
        (["trace", "records", "-o", "."], "expected to write the trace"),
        (["doctor", "nonsense"], "expected a URL like http"),
        (["status", "foo"], "expected a URL like http"),
        (["status", "/tmp"], "expected a URL like http"),
        (["inspect", "http://"], "expected a URL like http"),
        (["inspect", "ftp://x"], "expected a URL like http"),
        (["verify", "ftp://x"], "expected a URL like http"),
        (["diff", "ftp://x", "nothing"], "expected a URL like http"),
        (["inspect", "fifo"], "at fifo: expected a regular file, got a FIFO"),
        (["fetch", "http://127.0.0.1:9", "-o", "."], "expected the name of a regular file or of a new file"),
        (["fetch", "http://127.0.0.1:9", "-o", "none/x"], "No such file or directory"),
    ],
)
def test_wrong_usage_and_nothing_of_the_name_is_exit_code_2(
    arguments: list[str], said: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records").write_bytes(b'{"kind":"heal","begun_unix_s":1.0,"length_s":1.0,"outcome":"ok"}\n')
    os.mkfifo(tmp_path / "fifo")
    code, output = run(*arguments)
    assert (code, said in output) == (2, True), output


LIGHTHOUSE = b"<head>\n  <title>Lighthouse Dashboard - torchft</title>"


@pytest.mark.parametrize(
    ("command", "page", "said"),
    [
        ("status", b"<p>", "another program answers"),
        *(
            (command, LIGHTHOUSE, "this is a Lighthouse")
            for command in ("status", "inspect", "verify", "fetch", "diff")
        ),
    ],
)
def test_what_answers_instead_of_a_replica_is_named(
    command: str, page: bytes, said: str, run: Run, tmp_path: Path
) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)
    more = {"fetch": ["-o", tmp_path / "m"], "diff": [tmp_path]}
    with scripted(answering(answer)) as port:
        code, output = run(command, f"http://127.0.0.1:{port}", *more.get(command, []))
    assert (code, said in output) == (2 if command == "diff" else 1, True), output


@pytest.fixture(scope="module")
def real_lighthouse() -> Iterator[str]:
    pytest.importorskip("torchft")
    with lighthouse() as url:
        yield url


def test_a_real_lighthouse_is_known_for_one(real_lighthouse: str, run: Run, tmp_path: Path) -> None:
    said = f"this is a Lighthouse; expected a replica's URL; ft-transport top {real_lighthouse}"
    for arguments in (["status", real_lighthouse], ["fetch", real_lighthouse, "-o", tmp_path / "m"]):
        code, output = run(*arguments)
        assert (code, said in output) == (1, True), output


def test_a_peer_that_is_not_there_is_said_with_what_to_look_at(run: Run) -> None:
    code, output = run("status", "http://127.0.0.1:9")
    assert code == 1
    assert "Connection refused" in output
    assert "→ is the replica running there? ft-transport doctor" in output


def _silent(peer: Peer) -> None:
    """Reads each request, as the kernel does for a process that is stopped, and answers none."""
    while peer.request():
        pass


@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_a_peer_that_does_not_answer_is_said_with_what_to_look_at(command: str, run: Run, tmp_path: Path) -> None:
    more = ["-o", tmp_path / "m"] if command == "fetch" else []
    with scripted(_silent) as port:
        code, output = run(command, f"http://127.0.0.1:{port}", "--timeout", 0.5, *more)
    assert code == 1
    assert output.startswith("DeadlineExceededError: ")
    assert "→ is the replica's process stopped" in output


def test_a_step_that_does_not_come_is_said_with_its_peer_once(run: Run, tmp_path: Path) -> None:
    source = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    try:
        source.send_checkpoint([], 7, {"w": torch.ones(9)}, TIMEOUT)
        code, output = run("fetch", source.metadata(), "--step", 8, "--timeout", 0.5, "-o", tmp_path / "m")
    finally:
        source.shutdown()
    assert code == 1
    assert output.count("(peer 127.0.0.1") == output.count("step 8)") == 1


def test_the_version_is_told_and_the_package_is_the_command() -> None:
    done = run_program([sys.executable, "-m", "ft_transport.cli", "--version"], timeout=60, check=True)
    assert done.stdout.startswith("ft-transport ")


def test_ctrl_c_while_it_imports_is_one_line() -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'ft_transport.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from ft_transport.cli.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")


def test_a_paragraph_of_help_fills_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, "--help"]).output
        text = [line.strip() for line in shown.split("╭")[0].splitlines()]
        for line, following in pairwise(text):
            if line and following and not line.startswith("Usage"):
                assert len(line) + 1 + len(following.split()[0]) > 78, f"{line!r} breaks before {following!r}"


def test_help_lists_each_command_and_another_name_is_wrong_usage(run: Run) -> None:
    code, output = run("--help")
    assert code == 0
    for command in (*COMMANDS, "demo", "trace", "watch-token"):
        assert f" {command} " in output
    code, output = run("statsu")
    assert (code, "No such command" in output) == (2, True)


def test_the_demo_takes_the_arguments_of_the_demo() -> None:
    pytest.importorskip("torchft")
    result = CliRunner().invoke(app, ["demo", "--width", "wide"])
    assert result.exit_code == 2
    assert "invalid int value: 'wide'" in result.output


def test_commands_on_files_start_without_what_takes_long_to_import() -> None:
    code = (
        "import sys\n"
        "from ft_transport.cli import main, diff, explain, inspect, verify\n"
        "sys.exit(bool({'torch', 'numpy', 'aiohttp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
