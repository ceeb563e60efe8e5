"""A replica that is about to be preempted stops at one step on all ranks, and resumes there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_ranks import Job
from programs import run
from quorum_threads import lighthouse
from ranks import served_store
from replica_fleet import ReplicaFleet

from manager.recovery.preemption import PREEMPTED_EXIT_CODE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

GRACE_S = 20.0
LONG_S = 30.0


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path, request.param, keep_every=1000)
    yield found
    found.close()


@pytest.fixture
def port() -> Iterator[int]:
    with served_store() as found:
        yield found


def start(job: Job, port: int, grace_s: float = GRACE_S) -> None:
    job.start(port, KEEPING_GRACE_S=str(grace_s))
    job.wait()


def ended(job: Job) -> list[int]:
    """The exit codes, when all ranks have ended."""
    deadline_s = time.monotonic() + LONG_S
    while any(process.poll() is None for process in job.processes):
        assert time.monotonic() < deadline_s, "a rank has not ended"
        time.sleep(0.005)
    codes = [process.returncode for process in job.processes]
    job.processes.clear()
    return codes


def assert_resumes_where_it_stopped(job: Job) -> None:
    stopped = {int(job.notes(rank)[-1][0]) for rank in range(job.num_ranks)}
    assert len(stopped) == 1, "all ranks have noted the same last step"
    with served_store() as port:
        start(job, port)
        # The boundary at which they stopped was not noted.
        assert {job.resumed(rank)[-1] for rank in range(job.num_ranks)} == {stopped.pop() + 1}
        for process in job.processes:
            process.send_signal(signal.SIGTERM)
        assert ended(job) == [PREEMPTED_EXIT_CODE] * job.num_ranks
    job.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_one_step(job: Job, port: int, number: signal.Signals) -> None:
    start(job, port)
    job.processes[-1].send_signal(number)
    assert ended(job) == [PREEMPTED_EXIT_CODE] * job.num_ranks
    assert_resumes_where_it_stopped(job)


def test_signals_to_all_ranks_at_different_moments(job: Job, port: int) -> None:
    start(job, port)
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
        step = job.newest_step(0)
        while job.newest_step(0) < step + 2 and process.poll() is None:
            time.sleep(0.001)
    assert ended(job) == [PREEMPTED_EXIT_CODE] * job.num_ranks
    assert_resumes_where_it_stopped(job)


def test_a_notice_that_is_polled(job: Job, port: int) -> None:
    start(job, port)
    (job.directory / "0.announced").touch()
    assert ended(job) == [PREEMPTED_EXIT_CODE] * job.num_ranks
    (job.directory / "0.announced").unlink()
    assert_resumes_where_it_stopped(job)


def test_a_second_signal_ends_a_stuck_rank_at_once(job: Job, port: int) -> None:
    start(job, port)
    for rank in range(job.num_ranks):
        (job.directory / f"{rank}.stuck").touch()
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    time.sleep(2.2)  # a signal that arrives earlier repeats the first one
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    # 1 if a rank notices that the other one is gone before it receives its own signal.
    codes = ended(job)
    assert codes[0] == PREEMPTED_EXIT_CODE
    assert set(codes) <= {PREEMPTED_EXIT_CODE, 1}


def test_a_stuck_rank_ends_with_the_grace_period(job: Job, port: int) -> None:
    start(job, port, grace_s=1.0)
    (job.directory / "0.stuck").touch()
    job.processes[-1].send_signal(signal.SIGTERM)
    # 1 if the exit of an interpreter hangs, because the other rank is gone.
    assert set(ended(job)) <= {PREEMPTED_EXIT_CODE, 1}


@pytest.mark.usefixtures("quorum_ready")
def test_the_others_do_not_wait_for_a_preempted_replica(tmp_path: Path) -> None:
    """The Lighthouse would wait half a minute for one that is silent."""
    with lighthouse(heartbeat_timeout_ms=30_000) as address:
        fleet = ReplicaFleet(tmp_path, address, "--step-s", "0.05", "--timeout-s", "5", "--keep-every", "1000")
        try:
            for name in "abc":
                fleet.start(name)
            fleet.wait_for("steps", lambda: all(fleet.newest_step_of(name) > 3 for name in "abc"), LONG_S)
            victim = fleet.processes.pop("b")
            victim.send_signal(signal.SIGTERM)
            assert victim.wait(LONG_S) == PREEMPTED_EXIT_CODE
            step = fleet.newest_step()
            fleet.wait_for("further steps", lambda: min(map(fleet.newest_step_of, "ac")) > step + 5, 10.0)
            fleet.start("b")
            fleet.wait_for("b to train again", lambda: fleet.newest_step_of("b") > step + 5, LONG_S)
            own = [each for each in fleet.events if each.name == "b" and each.event in {"resumed", "boundary"}]
            first, second = (number for number, each in enumerate(own) if each.event == "resumed")
            assert own[first].fields["step"] == 0
            # The step that it had begun last was committed, unless another replica failed in it.
            begun = own[second - 1].fields["step"]
            assert own[second].fields["step"] in {begun, begun + 1}
            assert not {step: digests for step, digests in fleet.digests().items() if len(digests) > 1}
        finally:
            fleet.close()


_HANDLERS = """
import os, signal, time
from manager import Manager, ManagerError
manager = Manager()
manager.on_preemption()
try:
    manager.on_preemption()
except ManagerError:
    print("one call")
begun, begins = os.pipe()
child = os.fork()
if not child:
    os.write(begins, b"1")
    for _ in range(300):
        time.sleep(0.1)  # a signal right before it does not interrupt it
    os._exit(0)
os.read(begun, 1)  # Python drops a signal that reaches the child during the fork
os.kill(child, signal.SIGTERM)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
manager.shutdown()
print("shut down", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""


def test_a_forked_child_and_a_process_after_its_shutdown_end_as_before() -> None:
    """A worker of a data loader is ended by SIGTERM."""
    done = run([sys.executable, "-c", _HANDLERS], stdout=subprocess.PIPE, timeout=LONG_S)
    assert done.stdout.split("\n") == ["one call", "child -15", "shut down", ""]
    assert done.returncode == -signal.SIGTERM


_LOADER = """
import os, signal, torch
from torch.utils.data import DataLoader
from ft_transport import HTTPTransport
from manager import Manager
manager = Manager(checkpoint_transport=HTTPTransport(), keep_every=1000)
manager.on_preemption()
part = {}
manager.register_state_dict_fn("part", part.update, lambda: dict(part))
batches = iter(DataLoader(torch.zeros(10_000), num_workers=2))
try:
    for step in range(10_000):
        manager.start_step(step)
        next(batches)
        if step == 5:
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGTERM)  # as a scheduler and a launcher do
finally:
    print("stopped", manager.current_step() > 5)
"""


def test_a_signal_to_the_process_group_spares_the_workers_of_a_data_loader() -> None:
    done = run([sys.executable, "-c", _LOADER], stdout=subprocess.PIPE, timeout=LONG_S, start_new_session=True)
    assert done.stdout == "stopped True\n"
    assert done.returncode == PREEMPTED_EXIT_CODE


_THREAD = """
import sys, threading
from ft_transport import CheckpointStore
from manager import Manager, ManagerError, PreemptedExit
manager = Manager(checkpoint_store=CheckpointStore(sys.argv[1]))
part = {"one": 1}
manager.register_state_dict_fn("part", part.update, lambda: dict(part))
announced = threading.Event()
def train():
    try:
        manager.on_preemption()
    except ManagerError as error:
        print("signals=()" in str(error))
    manager.on_preemption(signals=(), is_announced=announced.is_set)
    try:
        for step in range(1_000_000):
            manager.start_step(step)
            announced.set()
    except PreemptedExit as end:
        print("stopped", end.step > 0)
thread = threading.Thread(target=train)
thread.start()
thread.join()
print("saved", CheckpointStore(sys.argv[1], read_only=True).latest() > 0)
manager.shutdown()
"""


def test_a_notice_that_is_polled_stops_a_loop_on_another_thread(tmp_path: Path) -> None:
    """As frameworks run it. Python sets no signal handlers there."""
    done = run([sys.executable, "-c", _THREAD, str(tmp_path)], stdout=subprocess.PIPE, timeout=LONG_S)
    assert (done.stdout.split("\n"), done.returncode) == (["True", "stopped True", "saved True", ""], 0), done.stderr
