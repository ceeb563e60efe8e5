"""torchtitan's real trainers with our checkpointer: killed runs train and log what an undisturbed run does."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from example_runs import ExampleReplicas, Rank, example_replicas
from quorum_threads import lighthouse

pytestmark = [pytest.mark.usefixtures("torchft_ready"), pytest.mark.timeout(1200)]

WORKER = Path(__file__).parents[1] / "workers" / "titan_run.py"
EXAMPLE = "train_torchtitan.py"
_TIMEOUT_S = 240.0
_NUM_RANKS = 2
_AGENT_S = 60.0
"""Time in which a rank may notice itself that another one was killed."""


@dataclass
class Outcome:
    """The printed results of a run: losses of each rank and learning rates by step, and the end of each rank."""

    losses: dict[tuple[str, int], set[tuple[float, float]]] = field(default_factory=lambda: defaultdict(set))
    rates: dict[int, set[float]] = field(default_factory=lambda: defaultdict(set))
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_steps: int = 0

    @classmethod
    def of(cls, starts: list[list[Rank]]) -> Outcome:
        outcome = cls()
        for printed in (line for ranks in starts for rank in ranks for line in rank.printed):
            said = json.loads(printed)
            if said["kind"] == "step":
                outcome.num_steps += 1
                outcome.rates[said["step"]].add(said["extra"].get("lr", 0.0))
                outcome.losses[said["rank"], said["step"]].add((said["loss"], said["grad_norm"]))
            elif said["kind"] == "end":
                outcome.ends[said["rank"]] = said
        return outcome


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as at:
        yield at


def undisturbed(address: str, folder: Path, *arguments: str) -> Outcome:
    """Train with torchtitan alone."""
    with example_replicas(str(WORKER), address) as runs:
        runs.start("plain", "--plain", "--folder", str(folder), *arguments, environment={}, num_ranks=_NUM_RANKS)
        runs.wait_for_end(_TIMEOUT_S)
        return Outcome.of(runs.starts["plain"])


def kill_at_random(runs: ExampleReplicas, name: str, chosen: random.Random) -> None:
    """Kill all ranks or one rank of the newest start at a random moment, and wait for all of them to end.

    There is no agent here, as torchrun has one: it ends the other ranks at once. A rank that waits for the dead one in
    ``resume`` would go on waiting until the timeout of its store.
    """
    ranks = runs.starts[name][-1]
    runs.wait_for_lines(ranks, chosen.randint(1, 9), _TIMEOUT_S)
    time.sleep(chosen.random() * 0.3)  # no wait for a condition: the kill falls between two lines
    for rank in chosen.choice([ranks, [chosen.choice(ranks)]]):
        rank.process.kill()
    for rank in ranks:
        try:
            rank.process.wait(_AGENT_S)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait(_TIMEOUT_S)


def assert_same(killed: Outcome, whole: Outcome) -> None:
    assert killed.ends == whole.ends
    assert len(killed.ends) == _NUM_RANKS
    # A step that was not committed is logged as well.
    assert [key for key, losses in whole.losses.items() if not losses <= killed.losses[key]] == []


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_killed_ranks_end_as_torchtitan_alone(address: str, tmp_path: Path, num_kills: int) -> None:
    steps = ("--steps", str(8 * num_kills))
    whole = undisturbed(address, tmp_path / "plain", *steps)
    chosen = random.Random(num_kills)
    with example_replicas(str(WORKER), address) as runs:
        for number in range(num_kills + 1):
            arguments = (*steps, "--folder", str(tmp_path / "out"), "--save-every", "7", "--keep-every", "3")
            runs.start("ours", *arguments, environment={}, num_ranks=_NUM_RANKS)
            if number < num_kills:
                kill_at_random(runs, "ours", chosen)
        runs.wait_for_end(_TIMEOUT_S)
        killed = Outcome.of(runs.starts["ours"])
    assert_same(killed, whole)
    assert killed.num_steps < 2 * whole.num_steps, "it resumed, and did not begin again"


def test_a_preempted_run_and_a_checkpoint_of_torchtitan_are_continued(address: str, tmp_path: Path) -> None:
    whole = undisturbed(address, tmp_path / "plain", "--steps", "12")
    # torchtitan's own checkpointer saves step 4; ours goes on from there, is preempted, and goes on again.
    undisturbed(address, tmp_path / "out", "--steps", "12", "--theirs", "--save-every", "4", "--stop-after", "5")
    arguments = ("--steps", "12", "--folder", str(tmp_path / "out"), "--save-every", "50", "--preemption")
    with example_replicas(str(WORKER), address) as runs:
        ranks = runs.start("ours", *arguments, environment={}, num_ranks=_NUM_RANKS)
        runs.wait_for_lines(ranks, 5, _TIMEOUT_S)
        ranks[1].process.send_signal(signal.SIGUSR1)
        assert [rank.process.wait(_TIMEOUT_S) for rank in ranks] == [75, 75]
        (alone,) = runs.start("alone", *arguments, environment={}, num_ranks=1)
        assert alone.process.wait(_TIMEOUT_S) == 1
        assert "got a state of other ranks; pass exclude_from_loading" in alone.log.read_text()
        del runs.starts["alone"]
        runs.start("ours", *arguments, environment={}, num_ranks=_NUM_RANKS)
        runs.wait_for_end(_TIMEOUT_S)
        outcome = Outcome.of(runs.starts["ours"])
    assert outcome.ends == whole.ends
    assert min(step for _, step in outcome.losses) == 5
    assert all(losses == whole.losses[key] for key, losses in outcome.losses.items())


def test_a_run_that_ended_before_its_export_writes_it_and_then_says_that_it_is_over(
    address: str, tmp_path: Path
) -> None:
    with example_replicas(str(WORKER), address) as runs:
        arguments = ("--steps", "4", "--folder", str(tmp_path), "--save-every", "50", "--keep-every", "2")
        (rank,) = runs.start("fails", *arguments, environment={"NO_EXPORT": "1"})
        assert rank.process.wait(_TIMEOUT_S) == 1
        assert not list(tmp_path.glob("checkpoint/step-*/.metadata"))
        (rank,) = runs.start("again", *arguments, environment={})
        assert rank.process.wait(_TIMEOUT_S) == 0, rank.log.read_text()
        assert Outcome.of(runs.starts["again"]).num_steps == 0
        assert (tmp_path / "checkpoint" / "step-4" / ".metadata").exists()
        (rank,) = runs.start("over", *arguments, environment={})
        assert rank.process.wait(_TIMEOUT_S) == 1
        assert "the run is over" in rank.log.read_text()


def test_replicas_with_another_division_of_the_data_are_refused(address: str, tmp_path: Path) -> None:
    with example_replicas(str(WORKER), address) as runs:
        arguments = ("--folder", str(tmp_path), "--save-every", "2", "--replicas", "2")
        (first,) = runs.start("0", *arguments, "--steps", "50", environment={})
        runs.wait_for_lines([first], 9, _TIMEOUT_S)
        runs.kill("0")
        for rank in runs.start("0", *arguments, "--steps", "60", environment={}, num_ranks=2):
            assert rank.process.wait(_TIMEOUT_S) == 1
            assert "expected the division of the data of the loaded state" in rank.log.read_text()


@pytest.mark.parametrize("warmup", ["0", "2"])
def test_a_step_that_was_not_committed_is_repeated_with_its_rate(address: str, tmp_path: Path, warmup: str) -> None:
    with example_replicas(str(WORKER), address) as runs:
        for failing in ("", "--fail-first"):
            folder = ("--folder", str(tmp_path / f"out{failing}"), "--replicas", "2", "--warmup", warmup)
            (rank,) = runs.start("0", *folder, "--steps", "4", *failing.split(), environment={})
            assert rank.process.wait(_TIMEOUT_S) == 0, rank.log.read_text()
        whole, failed = (Outcome.of([ranks]) for ranks in runs.starts["0"])
    assert failed.ends == whole.ends
    assert failed.num_steps == whole.num_steps + 1
    assert failed.rates == whole.rates


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_killed_replicas_of_two_ranks_end_as_those_that_nobody_killed(
    address: str, tmp_path: Path, num_kills: int
) -> None:
    """FSDP2 within the replicas, and torchtitan's asynchronous quorum in each step."""
    steps = ("--steps", str(10 * num_kills))
    chosen = random.Random(num_kills)
    outcomes = []
    for num in (0, num_kills):
        with example_replicas(str(WORKER), address) as runs:

            def start(name: str, folder: str = str(tmp_path / str(num)), runs: ExampleReplicas = runs) -> None:
                arguments = (*steps, "--folder", folder, "--save-every", "25", "--keep-every", "5")
                replica = ("--replicas", "2", "--min-replicas", "2", "--replica", name)
                runs.start(name, *arguments, *replica, environment={}, num_ranks=_NUM_RANKS)

            start("0")
            start("1")
            for _ in range(num):
                name = chosen.choice("01")
                kill_at_random(runs, name, chosen)
                start(name)
            runs.wait_for_end(2 * _TIMEOUT_S)
            outcomes.append({name: Outcome.of(starts) for name, starts in runs.starts.items()})
    whole, killed = outcomes
    for name in "01":
        assert_same(killed[name], whole[name])
    assert whole["0"].ends == whole["1"].ends


def test_a_killed_replica_with_diloco_heals(tmp_path: Path) -> None:
    with lighthouse(min_replicas=2) as at, example_replicas(str(WORKER), at) as replicas:
        arguments = ("--steps", "24", "--sync-every", "4", "--replicas", "2", "--min-replicas", "2")

        def start(name: str) -> None:
            folder = ("--folder", str(tmp_path / name))
            replicas.start(name, *arguments, *folder, "--replica", name, environment={})

        start("0")
        start("1")
        replicas.wait_for_lines(replicas.starts["1"][-1], 22, _TIMEOUT_S)
        replicas.kill("1")
        start("1")
        replicas.wait_for_end(2 * _TIMEOUT_S)
        ends = [Outcome.of(replicas.starts[name]).ends["0"] for name in "01"]
        assert ends[0]["weights"] == ends[1]["weights"]
        restarted = Outcome.of(replicas.starts["1"][-1:])
        assert restarted.num_steps < 24, "it went on from a sync, and did not begin again"
