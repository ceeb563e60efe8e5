"""The leak check of ``tests/conftest.py``, shown on a run of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKY = """
    import os, socket, subprocess, threading
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
        child = subprocess.Popen(["sleep", "60"])
        kept.extend([child.kill, child.wait])

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


def test_it_names_what_a_test_leaves_behind(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nleak_grace_s = 0.3\n")
    pytester.makepyfile(LEAKY)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)

    result.assert_outcomes(passed=6, errors=4)
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
