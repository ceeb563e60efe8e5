"""The leak check of ``tests/conftest.py``, shown on a run of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKY = """
    import os, signal, socket, subprocess, sys, threading
    import pytest

    kept = []

    @pytest.fixture(scope="module", autouse=True)
    def _undo():
        yield
        for undo in kept:
            undo()

    def test_thread():
        released = threading.Event()
        thread = threading.Thread(target=released.wait, name="left-alone", daemon=True)
        thread.start()
        kept.append(released.set)

    def test_descriptor():
        fd = os.memfd_create("left-open")
        kept.append(lambda: os.close(fd))

    def test_process():
        kept.append(subprocess.Popen(["sleep", "60"]).poll)

    def test_the_process_is_gone():
        assert kept[-1]() is not None

    def test_a_program_ends_by_ctrl_c():
        program = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
        assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGINT

    def test_recording():
        from ft_transport.telemetry.recorder import Recorder

        recording = Recorder().begin("save")
        kept.append(recording.end)

    def test_clean():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        with open(os.devnull, "rb"), socket.socket():
            subprocess.run(["true"], check=True)

    def test_thread_that_ends_within_the_grace():
        threading.Timer(0.05, lambda: None).start()
"""


def test_it_names_what_a_test_leaves_behind_also_where_ctrl_c_is_ignored(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nleak_grace_s = 0.3\n")
    pytester.makepyfile(LEAKY)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)

    result.assert_outcomes(passed=8, errors=4)
    result.stdout.fnmatch_lines_random(
        [
            "*ERROR at teardown of test_thread *",
            "  thread 'left-alone' (native id *, daemon)",
            "*ERROR at teardown of test_descriptor *",
            "  descriptor /memfd:left-open (deleted)",
            "*ERROR at teardown of test_process *",
            "  process * (sleep)",
            "*ERROR at teardown of test_recording *",
            "the test left a recording open",
        ]
    )
