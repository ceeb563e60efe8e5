"""A replica resumes after the loss of any one of its hosts, in the same layout or another."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from keepers import wait_until
from kill_ranks import Job
from ranks import served_store

from manager.recovery.preemption import PREEMPTED_EXIT_CODE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

LONG_S = 30.0
TWO_HOSTS = ("a", "a", "b", "b")


class Hosts:
    """The lives of a job whose ranks are on several hosts."""

    def __init__(self, directory: Path) -> None:
        self.job = Job(directory, 4, keep_every=2)

    def run(self, hosts: Sequence[str], until: Callable[[], bool], **variables: str) -> None:
        self.job.hosts = list(hosts)
        with served_store() as port:
            self.job.start(port, **{"KEEPING_COPIES": "2", **variables})
            try:
                self.job.wait()
                wait_until(until)
            finally:
                self.job.kill()

    def have_copied(self, step: int = 4) -> bool:
        return all(self.job.copied_step(rank) >= step for rank in range(len(self.job.hosts)))

    def are_held_after_copies(self) -> bool:
        """Hold all ranks in one step, whose boundary they have noted, as soon as they have copies."""
        hold = self.job.directory / "hold"
        if not hold.exists() and self.have_copied():
            # Far enough that no rank has reached it.
            written = hold.with_name("written")
            written.write_text(str(self.job.newest_step(0) + 10))
            written.replace(hold)
        if not hold.exists() or {str(self.job.newest_step(rank)) for rank in range(4)} != {hold.read_text()}:
            return False
        hold.unlink()
        return True

    def resumed(self) -> set[tuple[int, ...]]:
        """The step at which each rank resumed last."""
        return {self.job.resumed(rank)[-1] for rank in range(len(self.job.hosts))}  # type: ignore[return-value]

    def sources(self) -> list[str]:
        notes = map(self.job.notes, range(len(self.job.hosts)))
        resumed = [[words for words in each if words[0] == "resumed"][-1] for each in notes]
        return [words[3].replace("_", " ") for words in resumed]

    def assert_resumed_with(self, digests: dict[str, str]) -> None:
        (step,) = self.resumed()
        assert step >= 4
        for rank in range(len(self.job.hosts)):
            notes = self.job.notes(rank)
            resumed_at = max(at for at, words in enumerate(notes) if words[0] == "resumed")
            assert notes[resumed_at + 1] == [str(step), digests[str(step)]]

    def close(self) -> None:
        self.job.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("layout", "lost"),
    [
        ("fsdp", "a"),
        pytest.param("fsdp", "b", marks=pytest.mark.long),
        ("hsdp", "b"),
        pytest.param("ddp", "a", marks=pytest.mark.long),
    ],
)
def test_ranks_resume_exactly_after_the_loss_of_a_host(hosts: Hosts, lost: str, layout: str) -> None:
    hosts.run(TWO_HOSTS, hosts.have_copied, KEEPING_LAYOUT=layout)
    hosts.job.lose(lost)
    hosts.run(["c" if each == lost else each for each in TWO_HOSTS], lambda: True, KEEPING_LAYOUT=layout)
    (step,) = hosts.resumed()
    assert step >= 4
    own, partner = "the keeper of this host", "a partner's keeper"
    assert hosts.sources() == [partner if each == lost else own for each in TWO_HOSTS]
    hosts.job.check()


@pytest.mark.parametrize(
    ("lost", "after"),
    [
        pytest.param(None, ("a", "a"), id="2 ranks", marks=pytest.mark.long),
        pytest.param("b", ("a", "c", "c"), id="3 ranks"),
    ],
)
def test_another_number_of_ranks_resumes_exactly(hosts: Hosts, after: Sequence[str], lost: str | None) -> None:
    hosts.run(TWO_HOSTS, hosts.are_held_after_copies, KEEPING_IS_WHOLE="1")
    if lost is not None:
        hosts.job.lose(lost)
    before = {words[0]: words[1] for words in hosts.job.notes(0) if words[0].isdigit()}
    hosts.run(after, lambda: True, KEEPING_IS_WHOLE="1")
    hosts.assert_resumed_with(before)
    assert set(hosts.sources()) == {"the keepers of 4 ranks"}


@pytest.mark.parametrize("lost", [pytest.param("a", marks=pytest.mark.long), "c"])
def test_ranks_that_come_back_on_other_hosts_resume_exactly(hosts: Hosts, lost: str) -> None:
    hosts.run("abcd", hosts.have_copied)
    hosts.job.lose(lost)
    hosts.run(["d", "c", "b", "a"], lambda: True)
    (step,) = hosts.resumed()
    assert step >= 4
    hosts.job.check()


@pytest.mark.long
def test_another_mesh_of_as_many_ranks_resumes_exactly(hosts: Hosts) -> None:
    hosts.run(TWO_HOSTS, hosts.are_held_after_copies, KEEPING_IS_WHOLE="1", KEEPING_LAYOUT="hsdp")
    before = {words[0]: words[1] for words in hosts.job.notes(0) if words[0].isdigit()}
    hosts.job.lose("b")
    hosts.run(TWO_HOSTS, lambda: True, KEEPING_IS_WHOLE="1", KEEPING_LAYOUT="fsdp")
    hosts.assert_resumed_with(before)
    assert set(hosts.sources()) == {"the keepers of 4 ranks"}


@pytest.mark.slow
def test_a_flipped_bit_in_a_copy_is_named_and_the_state_before_it_taken(hosts: Hosts) -> None:
    spoil, stuck = hosts.job.directory / "2.spoil", hosts.job.directory / "2.stuck"
    spoil.touch()
    hosts.run(TWO_HOSTS, lambda: stuck.exists() and hosts.have_copied(int(stuck.read_text())))
    stuck.unlink()
    hosts.job.lose("a")
    hosts.run(["c", "c", "b", "b"], lambda: True)
    assert hosts.resumed() != {0}
    log = (hosts.job.directory / "0.err").read_text()
    assert "of the kept states cannot be loaded" in log
    assert "chunk" in log
    hosts.job.check()


def test_one_host_is_named_and_its_ranks_keep_on(hosts: Hosts) -> None:
    hosts.run("aaaa", lambda: hosts.job.newest_step(0) > 6)
    hosts.run("aaaa", lambda: True)
    assert "all 4 ranks are in 1 failure domains" in (hosts.job.directory / "0.err").read_text()
    assert hosts.resumed() != {0}
    hosts.job.check()


def test_a_lost_part_is_named(hosts: Hosts) -> None:
    hosts.run(TWO_HOSTS, lambda: hosts.job.newest_step(0) > 6, KEEPING_COPIES="1")
    hosts.job.lose("b")
    hosts.run(["a", "a", "c", "c"], lambda: True, KEEPING_COPIES="1")
    assert hosts.resumed() == {0}
    assert "those of ranks [2, 3] are lost" in (hosts.job.directory / "0.err").read_text()


def test_the_state_of_a_process_says_what_its_keeper_holds_and_who_copies_it(hosts: Hosts) -> None:
    states: list[Any] = []

    def is_read() -> bool:
        if not hosts.have_copied():
            return False
        address = [words[1] for words in hosts.job.notes(0) if words[0] == "at"][-1]
        with urlopen(address.removesuffix("/checkpoint/") + "/state", timeout=20) as answer:
            states.append(json.loads(answer.read()))
        return True

    hosts.run(TWO_HOSTS, is_read)
    kept = states[-1]["kept"]
    assert kept["step"] >= 4
    assert kept["num_bytes"] > 0
    assert kept["partners"] == kept["copied_ranks"] == [2]
    assert kept["copied_step"] >= 4


def test_a_preempted_host_may_go_away_after_the_last_step_was_copied(hosts: Hosts) -> None:
    def have_ended() -> bool:
        if not hosts.have_copied():
            return False
        hosts.job.processes[0].send_signal(signal.SIGTERM)
        codes = [process.wait(LONG_S) for process in hosts.job.processes]
        assert codes == [PREEMPTED_EXIT_CODE] * 4
        return True

    hosts.run(TWO_HOSTS, have_ended, KEEPING_GRACE_S="20")
    stopped = {int(hosts.job.notes(rank)[-1][0]) + 1 for rank in range(4)}
    hosts.job.lose("a")
    hosts.run(["c", "c", "b", "b"], lambda: True)
    assert hosts.resumed() == stopped
    hosts.job.check()
