from __future__ import annotations

import os
import select

import pytest
from benchmark_children import fail, repeat, with_a_child

from benchmarks.processes import Child, in_fresh_process

pytestmark = pytest.mark.usefixtures("bare_fork_server")


class TestChild:
    def test_answers_from_a_process_of_its_own_that_ends_when_its_parent_lets_go(self) -> None:
        child = Child(repeat, "echo")
        try:
            child.say(1)
            assert child.receive() == ("echo", 1, child.process_id)
            assert child.process_id != os.getpid()
            child._connection.close()
            child._process.join(10)
            assert child._process.exitcode == 0
        finally:
            child.close()

    def test_one_that_fails_tells_why(self, capfd: pytest.CaptureFixture[str]) -> None:
        child = Child(fail)
        try:
            with pytest.raises(RuntimeError, match=r"(?s)said before the end.*the reason"):
                child.receive()
        finally:
            child.close()
        assert capfd.readouterr() == ("", "")

    def test_one_that_says_nothing_does_not_keep_its_parent(self) -> None:
        child = Child(repeat, "echo")
        try:
            with pytest.raises(RuntimeError, match="within 0 s"):
                child.receive(timeout_s=0.3)
        finally:
            child.close()


class TestInFreshProcess:
    def test_ends_what_the_process_has_started(self) -> None:
        descriptor = os.pidfd_open(in_fresh_process(with_a_child))
        try:
            # Readable when the process has ended.
            assert select.select([descriptor], [], [], 10)[0]
        finally:
            os.close(descriptor)
