"""Programs that tests launch find and leave what an interpreter would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import Program, run

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="programs are interpreters here")

_TELL = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("A"), __name__, sys.path[0], os.getsid(0) == os.getpid()]))
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("start", [subprocess.Popen, Program])
def test_a_program_has_its_arguments_environment_directory_and_session(tmp_path: Path, start: type) -> None:
    script = tmp_path / "tell.py"
    script.write_text(_TELL)
    for command, first_place in ((["-c", _TELL], ""), ([str(script)], str(tmp_path))):
        with start(
            [sys.executable, *command, "7", "x"], cwd=tmp_path, env={**os.environ, "A": "b"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ) as process:  # fmt: skip
            output, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (7, "to stderr\n")
        argv = ["-c" if command[0] == "-c" else str(script), "7", "x"]
        assert json.loads(output) == [argv, str(tmp_path), "b", "__main__", first_place, True]


def test_a_program_ends_by_what_it_raises_and_runs_what_it_has_registered() -> None:
    done = run(
        [sys.executable, "-c", "import atexit; atexit.register(print, 'last'); raise ValueError('x')"], timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "last\n")
    assert done.stderr.endswith("ValueError: x\n")
    with pytest.raises(subprocess.CalledProcessError):
        run([sys.executable, "-c", "raise SystemExit('bye')"], timeout=60, check=True)


def test_a_program_has_the_descriptors_that_it_is_passed_and_no_others() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        opened = "[n for n in range(99) if os.path.exists(f'/proc/self/fd/{n}')]"
        program = f"import os; os.write({number}, b'here'); print({opened})"
        done = run([sys.executable, "-c", program], pass_fds=(number,), timeout=60)
        assert (ours.recv(10), done.stdout) == (b"here", f"{[0, 1, 2, number]}\n"), done.stderr
