"""After something went wrong: the next quorum works, and nothing of the failed step gets into it."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import TIMEOUT, Gate, lighthouse, loopback_transport, make_manager, run_replicas
from state_equality import exact

from manager import Manager, QuorumError, StateTornError

pytestmark = pytest.mark.usefixtures("quorum_ready")

SHORT = timedelta(seconds=0.5)
ABANDONED = timedelta(seconds=4)


def with_part(manager: Manager, part: dict[str, Any]) -> Manager:
    manager.register_state_dict_fn("part", part.update, lambda: dict(part))
    return manager


def test_a_quorum_that_failed_can_be_asked_for_again() -> None:
    with lighthouse(min_replicas=2) as address:
        keywords: dict[str, Any] = {"quorum_timeout": SHORT, "timeout": SHORT, "connect_timeout": SHORT}
        first = with_part(make_manager(address, "a", min_replica_size=2, **keywords), {})
        second = None
        try:
            with pytest.raises(QuorumError):
                first.start_quorum()
            # gloo misses at times that the first one has ended the connections, and then waits for as long.
            keywords = {"timeout": timedelta(seconds=2), "connect_timeout": timedelta(seconds=2)}
            second = with_part(make_manager(address, "b", min_replica_size=2, **keywords), {})

            def step(manager: Manager) -> bool:
                for _ in range(10):
                    try:
                        manager.start_quorum(timeout=TIMEOUT)
                        if manager.should_commit():
                            return True
                    except QuorumError:
                        continue
                return False

            assert run_replicas(lambda: step(first), lambda: step(second)) == [True, True]
        finally:
            first.shutdown()
            if second is not None:
                second.shutdown()


def test_a_late_lighthouse_does_not_cost_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = with_part(Manager(checkpoint_transport=loopback_transport()), {})
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "1")
    try:
        with pytest.raises(QuorumError, match=rf"Lighthouse at http://127\.0\.0\.1:{port} within 1 s"):
            manager.start_quorum()
        with lighthouse(port=port):
            manager.start_quorum()
            assert manager.should_commit()
            assert manager.replica_id().startswith("replica:")
            manager.shutdown()
    finally:
        manager.shutdown()


def test_what_forward_changed_in_a_failed_attempt_is_served_as_it_is_now(address: str) -> None:
    """The same step twice: between the attempts a buffer has moved on, and a newcomer must get the present one."""
    gate = Gate()

    def healthy() -> Any:
        buffer = {"buffer": torch.zeros(4)}
        manager = with_part(make_manager(address, "a"), buffer)
        manager.start_quorum()
        assert manager.should_commit()
        for attempt in range(2):
            gate.open(f"attempt {attempt}")
            while True:
                manager.start_quorum()
                manager.wait_quorum()
                joined = manager.num_participants() == 2
                # As forward does.
                buffer["buffer"] = buffer["buffer"] + 1.0
                if joined:
                    manager.report_error(RuntimeError("the other one will be gone"))
                assert manager.should_commit() is not joined
                if joined:
                    break
        manager.shutdown()
        return buffer["buffer"][0].item(), manager.current_step()

    def newcomer(attempt: int) -> Any:
        gate.wait(f"attempt {attempt}")
        part: dict[str, Any] = {}
        manager = with_part(make_manager(address, f"late_{attempt}"), part)
        manager.start_quorum()
        found = part["buffer"][0].item(), manager.current_step()
        manager.report_error(RuntimeError("leaves"))
        manager.shutdown()
        return found

    (last, step), (first_buffer, first_step), (second_buffer, second_step) = run_replicas(
        healthy, lambda: newcomer(0), lambda: newcomer(1)
    )
    assert second_step >= first_step
    # Every attempt, committed or not, has added one after its boundary.
    assert second_buffer == last - 1.0
    assert first_buffer < second_buffer
    assert step == second_step


def test_a_replica_that_waits_for_a_quorum_serves_the_state_that_it_waits_with(address: str) -> None:
    """Of two that gave up a step one waits for the other, which may still be healing from it: each for the other."""
    gate = Gate()

    def waiting(name: str) -> int:
        part = parts[name]
        manager = with_part(make_manager(address, name, min_replica_size=2), part)
        while manager.current_step() == 0:
            manager.start_quorum()
            manager.should_commit()
        manager.start_quorum()
        # As forward does.
        part["buffer"] = part["buffer"] + 1.0
        manager.report_error(RuntimeError("a batch was bad"))
        assert not manager.should_commit()
        addresses[name] = manager.metadata()
        gate.open(name)
        gate.wait(f"{name} goes on")
        while manager.current_step() == 1:
            manager.start_quorum()
            manager.should_commit()
        manager.shutdown()
        return manager.current_step()

    addresses: dict[str, str] = {}
    parts = {name: {"buffer": torch.zeros(4)} for name in ("a", "b")}
    newcomer = with_part(Manager(checkpoint_transport=loopback_transport()), received := {"buffer": torch.zeros(4)})

    def heal() -> float:
        gate.wait("a")
        gate.wait("b")
        gate.open("a goes on")
        try:
            newcomer.recover(addresses["a"], timeout=SHORT * 10)
        finally:
            gate.open("b goes on")
        return float(received["buffer"][0])

    first, second, healed = run_replicas(lambda: waiting("a"), lambda: waiting("b"), heal)
    newcomer.shutdown()
    assert (first, second) == (2, 2)
    assert healed == parts["a"]["buffer"][0]


def test_a_step_that_was_committed_and_not_made_has_to_be_healed(address: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    manager = make_manager(address, "a")
    try:
        manager.register("weights", torch.nn.ParameterList([weight]))
        manager.register("optimizer", optimizer)
        manager.attach(optimizer)
        manager.start_quorum()
        assert manager.should_commit()
        optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            optimizer.step()
        # Nobody else holds the step that this replica says it has.
        with pytest.raises(QuorumError, match="with a whole state"):
            manager.start_quorum()
        with pytest.raises(StateTornError, match=r"SGD.step\(\) failed: MemoryError"):
            optimizer.step()
    finally:
        manager.shutdown()


def test_collectives_of_an_abandoned_step_do_not_get_into_the_next(address: str) -> None:
    gate = Gate()

    def replica(index: int) -> Any:
        manager = with_part(make_manager(address, f"r{index}", min_replica_size=2), {})
        while True:
            manager.start_quorum()
            if manager.num_participants() == 2:
                break
            manager.should_commit()
        if index == 0:
            # Begun, and then the batch turned out to be bad.
            manager.allreduce(torch.full((2,), 100.0))
        gate.open(f"left {index}")
        gate.wait(f"left {1 - index}")
        for _ in range(10):
            manager.start_quorum()
            gradient = torch.full((2,), float(index))
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                break
        outcome = exact(gradient), gradient.tolist()
        gate.open(f"done {index}")
        gate.wait(f"done {1 - index}")
        manager.shutdown()
        return outcome

    first, second = run_replicas(lambda: replica(0), lambda: replica(1))
    assert first == second
    assert first[1] == [0.5, 0.5]


def test_an_abandoned_step_does_not_cost_the_others_a_timeout(address: str) -> None:
    gate = Gate()

    def replica(index: int) -> float:
        manager = with_part(make_manager(address, f"r{index}", min_replica_size=2, timeout=ABANDONED), {})
        num_steps = 0
        while num_steps < 3:
            manager.start_quorum()
            manager.allreduce(torch.ones(2)).wait()
            num_steps += manager.should_commit()
        gate.open(f"trained {index}")
        gate.wait(f"trained {1 - index}")
        begin_s = time.monotonic()
        if index == 0:
            manager.start_quorum()
            manager.wait_quorum()
        while num_steps < 4:
            manager.start_quorum()
            for _ in range(2):
                manager.allreduce(torch.ones(2)).wait()
            num_steps += manager.should_commit()
        seconds = time.monotonic() - begin_s
        gate.open(f"done {index}")
        gate.wait(f"done {1 - index}")
        manager.shutdown()
        return seconds

    # A group that is made anew takes a second or two where both cores are busy.
    assert max(run_replicas(lambda: replica(0), lambda: replica(1))) < 0.75 * ABANDONED.total_seconds()
