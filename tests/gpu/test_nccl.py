"""torchft's NCCL process group under the manager: it is set up, aborted and set up again, and no wait is for ever.

Each replica is a process of its own, because NCCL keeps threads and descriptors. The Lighthouse is torchft's. NCCL
refuses two members on one GPU, so a group of two needs two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest
import torch
from keepers import Trainer
from quorum_threads import LONG_S, lighthouse, run_replicas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("quorum_ready"),
]

WORKER = Path(__file__).parents[1] / "workers" / "torchft_group_replica.py"
NCCL = "ProcessGroupNCCL"
GLOO = "ProcessGroupGloo"
DEVICES = ("cuda:0", "cuda:1")

LIMIT_S = 15.0
"""Timeout of the manager and of its process group."""
SLACK_S = 15.0
"""For what is not the wait itself: a quorum without the dead, and a new NCCL communicator."""
SOON_S = 10.0

Start = Callable[..., Trainer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts replicas, and kills those that are left at the end."""
    with lighthouse() as address, ExitStack() as stack:

        def begin(name: str, group: str = NCCL, device: str = DEVICES[0], group_limit_s: float = LIMIT_S) -> Trainer:
            replica = Trainer(str(WORKER), address, name, group, device, str(LIMIT_S), str(group_limit_s))
            stack.callback(replica.kill)
            return replica

        yield begin


def average(replica: Trainer, value: float) -> list[float] | None:
    averaged: list[float] | None = replica.ask(f"step({value})")[0]
    return averaged


def train_together(first: Trainer, second: Trainer) -> None:
    """Step both, alone or not, until the averages are of both."""
    averages = run_replicas(lambda: first.ask("train(1.0, 2)"), lambda: second.ask("train(3.0, 2)"))
    assert averages == [[2.0] * 4] * 2


def test_a_replica_alone_averages_and_sets_its_group_up_again_after_an_error(start: Start) -> None:
    replica = start("alone")
    assert average(replica, 3.0) == [3.0] * 4
    number = replica.ask("group._quorum_id")
    assert average(replica, 4.0) == [4.0] * 4
    assert replica.ask("group._quorum_id") == number, "the group is set up once for its members"
    averaged, _, error = replica.ask("step(5.0, is_spoiled=True)")
    assert (averaged, error) == (None, "ValueError: spoiled")
    assert average(replica, 6.0) == [6.0] * 4
    assert replica.ask("group._quorum_id") != number
    assert replica.ask("weight.tolist()") == [-13.0] * 4


def test_a_member_that_never_connects_costs_one_limit_and_then_the_replica_trains_alone(start: Start) -> None:
    replica = start("trains")
    assert average(replica, 1.0) == [1.0] * 4
    absent = start("absent", group="Absent")
    absent.send("manager.start_quorum()")
    deadline_s = monotonic() + LONG_S
    averaged: list[float] | None = []
    while averaged is not None:
        assert monotonic() < deadline_s, "the absent member did not join"
        averaged, seconds, error = replica.ask("step(1.0)")
    assert error
    assert seconds < LIMIT_S + SLACK_S
    absent.kill()
    averaged, seconds, _ = replica.ask("step(7.0)")
    assert averaged == [7.0] * 4
    assert seconds < SLACK_S


@pytest.mark.parametrize("begun", ["pass", "manager.allreduce(weight.detach().clone())"])
def test_a_shutdown_ends_at_once(start: Start, begun: str) -> None:
    replica = start("alone")
    assert average(replica, 1.0) == [1.0] * 4
    replica.run("manager.start_quorum()")
    replica.run(begun)
    started_s = monotonic()
    replica.run("manager.shutdown()")
    replica.send("sys.exit()")
    replica.close()
    assert replica.process.returncode == 0
    assert monotonic() - started_s < SOON_S


def test_gloo_on_one_device_reduces_in_the_stream_that_begins_the_reduction(start: Start) -> None:
    first, second = start("first", GLOO), start("second", GLOO)
    train_together(first, second)
    on_side_stream = "step({}, side_stream=torch.cuda.Stream())[0]"
    for _ in range(3):
        averages = run_replicas(
            lambda: first.ask(on_side_stream.format(1.0)), lambda: second.ask(on_side_stream.format(3.0))
        )
        assert averages == [[2.0] * 4] * 2


@pytest.mark.skipif(torch.cuda.device_count() < len(DEVICES), reason="NCCL needs a device for each replica")
def test_a_replica_that_is_killed_in_an_allreduce_is_done_without(start: Start) -> None:
    # The survivor is not on the device with which its quorum thread begins, and its group would wait far longer.
    survivor, victim = start("survivor", device=DEVICES[1], group_limit_s=8 * LIMIT_S), start("victim")
    train_together(survivor, victim)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(survivor.ask, "step(1.0)")
        victim.run("manager.start_quorum(); manager.wait_quorum()")
        victim.kill()
        averaged, seconds, error = answer.result(LONG_S)
    assert averaged is None
    assert error
    assert seconds < LIMIT_S + SLACK_S
    averaged, seconds, _ = survivor.ask("step(5.0)")
    assert averaged == [5.0] * 4
    assert seconds < SLACK_S
    train_together(survivor, start("newcomer"))
