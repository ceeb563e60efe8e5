"""What torchft's classes and its users' programs call on its Manager, called on ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quorum_threads import LONG_S, lighthouse, make_manager, run_replicas
from torch import nn

from manager import Manager, QuorumTimeoutError, ReportedError, guard_diloco, guard_local_sgd

pytestmark = pytest.mark.usefixtures("quorum_ready")

MIN_REPLICAS = 2

NewManager = Callable[..., Manager]


@pytest.fixture
def alone() -> Iterator[Manager]:
    with lighthouse() as at:
        manager = make_manager(at, "replica_0", has_part=True)
        yield manager
        manager.shutdown()


@pytest.mark.usefixtures("one_rank_group")
def test_torchfts_managed_process_group_averages_what_hsdp_reduces(new_manager: NewManager) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torchft.process_group import ManagedProcessGroup

    # As torchtitan does: sharded within the replica, averaged between replicas by the hook.
    mesh = init_device_mesh("cpu", (1,))
    groups: dict[int, Any] = {}

    def reduce_between_replicas(reduced: torch.Tensor) -> None:
        dist.all_reduce(reduced, group=groups[threading.get_ident()], op=dist.ReduceOp.AVG)

    def local_gradient(model: nn.Module) -> torch.Tensor:
        gradient = next(model.parameters()).grad
        assert isinstance(gradient, DTensor)
        return gradient.to_local()

    def replica(index: int) -> tuple[torch.Tensor, int, str]:
        manager = new_manager(f"replica_{index}", min_replica_size=2, has_part=True)
        managed = groups[threading.get_ident()] = ManagedProcessGroup(manager)
        model = nn.Linear(4, 1, bias=False)
        with one_at_a_time:
            sharded: Any = fully_shard(model, mesh=mesh)
        sharded.set_all_reduce_hook(reduce_between_replicas)
        manager.start_quorum()
        manager.wait_quorum()
        with one_at_a_time:
            # Autograd runs the hook on this thread; the other replica reduces at the same time.
            loss = sharded(torch.full((1, 4), float(index))).sum()
        loss.backward()
        found = local_gradient(model)
        assert manager.should_commit()
        size = managed.size()
        return found, size, managed.getBackendName()

    one_at_a_time = threading.Lock()
    outcomes = run_replicas(lambda: replica(0), lambda: replica(1))
    for gradient, size, backend in outcomes:
        assert torch.equal(gradient, torch.full((1, 4), 0.5))
        assert size == 2
        assert backend == "ft-transport-gloo"


@pytest.mark.usefixtures("one_rank_group")
def test_a_functional_collective_after_the_commit_waits_for_its_result(new_manager: NewManager) -> None:
    import torch.distributed._functional_collectives as functional
    from torchft.process_group import ManagedProcessGroup

    # As torchtitan does for the logged loss. torch passes the work a timeout of 0, for none.
    def replica(index: int) -> list[float]:
        manager = new_manager(f"replica_{index}", min_replica_size=2, has_part=True)
        managed = ManagedProcessGroup(manager)
        managed.register(f"replicas_of_{index}")
        losses = []
        for step in range(3):
            manager.start_quorum()
            assert manager.should_commit()
            loss = functional.all_reduce(torch.tensor(float(step + index)), "sum", group=managed)
            losses.append(float(functional.wait_tensor(loss)))
        assert manager.errored() is None
        return losses

    assert run_replicas(lambda: replica(0), lambda: replica(1)) == [[1.0, 3.0, 5.0]] * 2


def test_a_future_is_wrapped_such_that_it_never_fails(alone: Manager) -> None:
    def failure(future: torch.futures.Future[Any]) -> Any:
        wrapped = alone.wrap_future(future, "default")
        future.set_exception(ConnectionError("lost"))
        return wrapped.wait()

    alone.start_quorum()
    alone.wait_quorum()
    good: torch.futures.Future[str] = torch.futures.Future()
    wrapped = alone.wrap_future(good, "default")
    good.set_result("good")
    assert wrapped.wait() == "good"
    assert alone.errored() is None
    assert failure(torch.futures.Future()) == "default"
    assert str(alone.errored()) == "ConnectionError: lost"
    assert not alone.should_commit()

    alone.start_quorum()
    alone.wait_quorum()
    never: torch.futures.Future[str] = torch.futures.Future()
    assert alone.wrap_future(never, "default", timedelta(milliseconds=10)).wait() == "default"
    assert "within 0.01 s" in str(alone.errored())
    assert not alone.should_commit()
    # Too late to change anything.
    never.set_result("late")


def test_an_error_is_returned_as_torchft_wraps_it(alone: Manager) -> None:
    assert alone.errored() is None
    alone.start_quorum()
    alone.wait_quorum()
    try:
        raise ConnectionError("lost")
    except ConnectionError as error:
        alone.report_error(error)
        first = error
    alone.report_error(ValueError("too late"))
    reported = alone.errored()
    assert isinstance(reported, ReportedError)
    assert reported.original_exception is first
    assert "test_an_error_is_returned_as_torchft_wraps_it" in reported.stack_trace
    assert not alone.should_commit()


def test_the_older_way_to_register_functions(caplog: pytest.LogCaptureFixture) -> None:
    manager = Manager()
    with caplog.at_level(logging.WARNING):
        manager.set_state_dict_fns(lambda state: None, lambda: {"weight": 1})
    assert manager.replica_state()["user"] == {"set_state_dict_fns": {"weight": 1}}
    assert "call register_state_dict_fn" in caplog.text
    manager.shutdown()


def test_attaching_torchfts_wrapper_is_refused_with_what_to_attach(alone: Manager) -> None:
    from torchft.optim import OptimizerWrapper

    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    wrapper = OptimizerWrapper(alone, inner)
    with pytest.raises(TypeError, match=r"got OptimizerWrapper, which .* manager\.attach\(wrapper\.optim\)"):
        alone.attach(wrapper)
    with alone.attach(wrapper.optim) as attachment:
        assert attachment.optimizers == (inner,)


def test_a_missing_gradient_is_refused_with_what_to_do(alone: Manager) -> None:
    alone.start_quorum()
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match="tensor to reduce, got NoneType; a parameter that the loss does not depend on"):
        alone.allreduce(parameter.grad)  # type: ignore[arg-type]
    assert alone.should_commit()


def test_whether_a_replica_participates_is_said_without_waiting(new_manager: NewManager) -> None:
    def replica(index: int) -> list[bool]:
        manager = new_manager(f"replica_{index}", min_replica_size=2, has_part=True)
        found = [manager.is_participating()]
        manager.start_quorum()
        found.append(manager.is_participating())
        assert manager.should_commit()
        if index == 0:
            # The other one asks for its quorum only after this.
            manager.start_quorum()
            found.append(manager.is_participating())
            with pytest.raises(QuorumTimeoutError):
                manager.should_commit(timeout=timedelta(0))
        asked.wait(LONG_S)
        if index == 1:
            manager.start_quorum()
        assert manager.should_commit()
        found.append(manager.is_participating())
        return found

    asked = threading.Barrier(2)
    first, second = run_replicas(lambda: replica(0), lambda: replica(1))
    assert first == [False, True, True, True]
    assert second == [False, True, True]


@pytest.mark.parametrize("holder", ["module", "optimizer", "attached optimizer"])
def test_what_is_left_of_a_gradient_when_a_replica_heals_is_not_averaged_in(
    holder: str, new_manager: NewManager
) -> None:
    def replica(index: int) -> tuple[float, float]:
        manager = new_manager(f"replica_{index}")
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, float(index))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if holder == "module":
            manager.register("model", model)
            del optimizer
        else:
            # Which parameters belong to this function is not to be seen.
            load = lambda state: model.load_state_dict(state)  # noqa: E731, PLW0108
            manager.register_state_dict_fn("model", load, model.state_dict)
            if holder == "optimizer":
                manager.register("optimizer", optimizer)
            else:
                manager.attach(optimizer)
        # Computed from the weights that healing replaces, as a loop does that accumulates gradients.
        model.weight.grad = torch.full((1, 1), 1000.0 * index)
        manager.start_quorum()
        if index == 0:
            model.weight.grad = torch.full((1, 1), 8.0)
        manager.allreduce(model.weight.grad).wait()
        assert manager.should_commit()
        found = model.weight.grad.item()
        return found, manager.num_participants()

    outcomes = run_replicas(lambda: replica(0), lambda: replica(1))
    assert outcomes == [(4.0, 2), (4.0, 2)]


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_torchfts_wrappers_of_an_attached_optimizer_are_warned_of_without_their_guard(
    kind: str, is_guarded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from torchft.local_sgd import DiLoCo, LocalSGD

    with lighthouse() as address:
        manager = make_manager(address, "replica_0", use_async_quorum=False)
        model = nn.Linear(2, 2)
        inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        manager.register("model", model)
        manager.register("inner", inner)
        wrapper: Any = (
            LocalSGD(manager, model, inner, sync_every=1)
            if kind == "LocalSGD"
            else DiLoCo(manager, [model], inner, outer, sync_every=1)
        )
        if is_guarded:
            (guard_local_sgd if kind == "LocalSGD" else guard_diloco)(manager, wrapper)
        with manager.attach(inner), wrapper:
            while manager.current_step() < 2:
                inner.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                inner.step()
        manager.shutdown()
    warnings = [record.getMessage() for record in caplog.records if "outside the lock" in record.getMessage()]
    assert len(warnings) == (0 if is_guarded else 1)
    guard = "guard_local_sgd" if kind == "LocalSGD" else "guard_diloco"
    assert all(f"torchft's {kind} changes" in said and guard in said for said in warnings)
