"""What the pages tell a reader to type runs: see ``workers/documented_page.py`` for how a block is left out."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import documented_page
import pytest
from documented_page import Block, blocks_of
from programs import run

pytest.importorskip("torchft")

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_RUN = ("python", "bash")
_MOST_NOT_RUN = 8
_TIMEOUT_S = 100.0


def _blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page.read_text()) if block.language in _RUN]


def _name(page: Path) -> str:
    return str(page.relative_to(_ROOT))


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("page", [page for page in _PAGES if _blocks(page)], ids=_name)
def test_the_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    done = run([sys.executable, documented_page.__file__, str(page)], cwd=tmp_path, timeout=_TIMEOUT_S)

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert "all blocks ran" in done.stdout
    if page.name == "README.md":  # where a program imports torchft itself, that has read the level of its messages
        assert "[torchft::" not in done.stdout + done.stderr, "a Lighthouse floods the terminal"
    expected = [f"{page.name}:{block.line}" for block in _blocks(page) if not (block.not_run or block.own_test)]
    assert [line for line in done.stdout.splitlines() if line in expected] == expected


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_quickstart_heals_a_replica(tmp_path: Path) -> None:
    blocks = _blocks(_ROOT / "docs" / "quickstart.md")
    [script] = [block.code for block in blocks if block.language == "python"]
    [commands] = [block.code for block in blocks if "torchft_lighthouse" in block.code]
    (tmp_path / "train.py").write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as reserved:  # the page's 29510 may be taken here
        port = str(reserved.getsockname()[1])
    commands = commands.replace("--min_replicas", f"--bind 127.0.0.1:{port} --min_replicas").replace("29510", port)
    lighthouse, first, second = commands.splitlines()
    with _Terminals(tmp_path) as terminals:
        terminals.type("lighthouse", lighthouse)
        terminals.type("first", first)
        terminals.type("second", second)
        terminals.wait_for("second", r"step ([3-9]), 2 replicas, weights \w+")
        terminals.kill("second")
        terminals.wait_for("first", r"step \d+, 1 replicas")
        terminals.type("again", second)
        [step, weights] = terminals.wait_for("again", r"step (\d+), 2 replicas, weights (\w+)")

        assert terminals.wait_for("first", rf"step {step}, 2 replicas, weights (\w+)") == [weights]
        assert int(step) > 3


class _Terminals:
    """One command in each, killed at the end; what they print is kept in files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Terminals:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._processes:
            self.kill(name)

    def type(self, name: str, command: str) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (self._directory / name).open("wb") as file:
            self._processes[name] = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self._directory,
                env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._processes[name].pid, signal.SIGKILL)
        self._processes[name].wait()

    def wait_for(self, name: str, pattern: str) -> list[str]:
        """The groups of the pattern, as soon as it is printed."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (found := re.search(pattern, text := (self._directory / name).read_text())) is None:
            assert self._processes[name].poll() is None, text
            assert time.monotonic() < deadline_s, "\n".join(
                f"=== {each}\n{(self._directory / each).read_text()[-2000:]}" for each in self._processes
            )
            time.sleep(0.05)
        return list(found.groups())


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [(_name(page), block) for page in _PAGES for block in _blocks(page) if block.not_run]

    assert [(name, block.line) for name, block in left_out if len(block.not_run.split()) < 4] == []
    assert len(left_out) <= _MOST_NOT_RUN, [(name, block.line) for name, block in left_out]


def test_each_block_with_a_test_of_its_own_has_it() -> None:
    for page in _PAGES:
        for block in _blocks(page):
            if block.own_test:
                file, _, name = block.own_test.partition("::")
                assert f"def {name}(" in (_ROOT / file).read_text()


def test_no_comment_stands_where_it_is_not_read() -> None:
    for page in _PAGES:
        text = page.read_text()
        read = sum(len(block.setups) + bool(block.not_run) + bool(block.own_test) for block in blocks_of(text))
        written = sum(text.count(f"<!-- {kind}") for kind in ("run first", "not run", "a test of its own"))
        assert read == written, _name(page)


def test_a_page_with_a_wrong_block_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n<!-- run first\ny = x\n-->\n```python\nassert y == 2\n```\n")

    done = run([sys.executable, documented_page.__file__, str(page)], cwd=tmp_path, timeout=_TIMEOUT_S)

    assert done.returncode == 1
    assert 'page.md", line 9' in done.stderr


@pytest.mark.parametrize("command", ["false", "false | true", "echo $MISSING"])
def test_a_command_that_fails_is_noticed(tmp_path: Path, command: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{command}\n```\n")

    done = run([sys.executable, documented_page.__file__, str(page)], cwd=tmp_path, timeout=_TIMEOUT_S)

    assert done.returncode == 1
    assert subprocess.CalledProcessError.__name__ in done.stderr


def test_a_reason_counts_for_the_block_right_below_it() -> None:
    right = "<!-- not run: it needs four GPUs -->\n```bash\na\n```\n\n"
    wrong = "<!-- not run: x -->\n\ntext\n\n```bash\nb\n```\n"
    text = right + wrong

    assert [(block.code, block.not_run) for block in blocks_of(text)] == [("a\n", "it needs four GPUs"), ("b\n", "")]
