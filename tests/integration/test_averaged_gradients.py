"""``average_gradients``: the average over the replicas, whatever gradients each of them has."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from quorum_threads import LONG_S, run_replicas
from torch import nn

from manager import Manager, ReductionMismatchError

MIN_REPLICAS = 2

pytestmark = pytest.mark.usefixtures("quorum_ready")

_LARGE = 1 << 19
"""Elements of a gradient that is reduced where it lies."""


@pytest.fixture
def managers(new_manager: Callable[..., Manager]) -> list[Manager]:
    return [new_manager(f"replica_{index}", min_replica_size=2, has_part=True) for index in (0, 1)]


def averaged(
    managers: list[Manager], gradients: Callable[[int], list[torch.Tensor | None]]
) -> list[list[torch.Tensor | None]]:
    """What both replicas have after averaging parameters with these gradients."""
    together = threading.Barrier(2)

    def replica(index: int) -> list[torch.Tensor | None]:
        manager = managers[index]
        parameters = []
        for gradient in gradients(index):
            like = gradient if gradient is not None else torch.zeros(4, 2)
            parameter = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
            parameter.grad = gradient
            parameters.append(parameter)
        together.wait(LONG_S)
        manager.start_quorum()
        assert manager.average_gradients(parameters)
        assert manager.should_commit()
        return [parameter.grad for parameter in parameters]

    return run_replicas(lambda: replica(0), lambda: replica(1))


def test_dense_gradients_of_any_size_and_dtype_are_averaged(managers: list[Manager]) -> None:
    def gradients(index: int) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(index)
        return [
            torch.randn(3, generator=generator),
            torch.randn(_LARGE, generator=generator),
            torch.randn(2, 5, generator=generator).to(torch.bfloat16),
            torch.randn(6, 4, generator=generator).t(),
            torch.randn((), generator=generator, dtype=torch.float64),
        ]

    first, second = averaged(managers, gradients)
    for own, other, one, two in zip(first, second, gradients(0), gradients(1), strict=True):
        assert own is not None
        assert other is not None
        assert one is not None
        assert two is not None
        assert torch.equal(own, other)
        assert torch.equal(own, (one + two) / 2)


def test_a_gradient_that_one_replica_lacks_counts_as_zeros(managers: list[Manager]) -> None:
    first, second = averaged(managers, lambda index: [torch.full((4, 2), 2.0) if index else None, None])
    for lacked, nowhere in (first, second):
        assert torch.equal(lacked, torch.ones(4, 2))  # type: ignore[arg-type]
        assert nowhere is None


def test_sparse_gradients_stay_sparse_unless_one_is_dense(managers: list[Manager]) -> None:
    def row(index: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[index]]), torch.full((1, 2), 4.0), (4, 2), check_invariants=True)

    first, second = averaged(managers, lambda index: [row(index), row(0) if index else torch.ones(4, 2)])
    for sparse, mixed in (first, second):
        assert sparse is not None
        assert sparse.layout is torch.sparse_coo
        assert torch.equal(sparse.to_dense(), torch.tensor([[2.0, 2.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))
        assert mixed is not None
        assert mixed.layout is torch.strided
        assert torch.equal(mixed, torch.tensor([[2.5, 2.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]))


def test_the_shards_of_a_sharded_model_are_averaged(managers: list[Manager], one_rank_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    made = threading.Lock()

    def replica(index: int) -> list[torch.Tensor]:
        with made:
            model = [nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])) for _ in range(2)]
            model[0].grad = distribute_tensor(torch.full((4, 2), float(index)), mesh, [Shard(0)])
            if index:
                model[1].grad = distribute_tensor(torch.full((4, 2), 3.0), mesh, [Shard(0)])
        manager = managers[index]
        manager.start_quorum()
        assert manager.average_gradients(model)
        assert manager.should_commit()
        gradients = [each.grad for each in model]
        assert all(isinstance(each, DTensor) and each.placements == (Shard(0),) for each in gradients)
        return [each.to_local() for each in gradients]  # type: ignore[union-attr, operator]

    for had, lacked in run_replicas(lambda: replica(0), lambda: replica(1)):
        assert torch.equal(had, torch.full((4, 2), 0.5))
        assert torch.equal(lacked, torch.full((4, 2), 1.5))


def test_a_layer_that_one_replica_froze_is_named(managers: list[Manager]) -> None:
    def replica(index: int) -> ReductionMismatchError:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(index == 0)
        manager = managers[index]
        manager.start_quorum()
        model(torch.ones(2)).sum().backward()
        assert not manager.average_gradients(model)
        assert not manager.should_commit()
        reported = manager.errored()
        assert reported is not None
        assert isinstance(reported.original_exception, ReductionMismatchError)
        return reported.original_exception

    for error in run_replicas(lambda: replica(0), lambda: replica(1)):
        assert [what for _, what in error.reductions] == [
            "0.weight float32[2, 2] in a bucket",
            "1.weight float32[2, 2] in a bucket",
        ]


def test_a_loop_that_clips_trains_the_same_as_one_process(managers: list[Manager]) -> None:
    def train(batches: Callable[[int], list[torch.Tensor]], average: Callable[[nn.Module], bool]) -> list[torch.Tensor]:
        with seeding:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(5):
            if average(model):
                optimizer.zero_grad()
            for batch in batches(step):
                (model(batch).square().mean() / len(batches(step))).backward()
            average(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return [each.detach() for each in model.parameters()]

    def batch(index: int, step: int) -> torch.Tensor:
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * index + step))

    def replica(index: int) -> list[torch.Tensor]:
        manager, is_first = managers[index], [True]

        def average(model: nn.Module) -> bool:
            is_first[0] = not is_first[0]
            if not is_first[0]:
                manager.start_quorum()
                return True
            assert manager.average_gradients(model)
            return manager.should_commit()

        return train(lambda step: [batch(index, step)], average)

    seeding = threading.Lock()
    first, second = run_replicas(lambda: replica(0), lambda: replica(1))
    alone = train(lambda step: [batch(0, step), batch(1, step)], lambda model: True)
    for one, two, expected in zip(first, second, alone, strict=True):
        assert torch.equal(one, two)
        assert torch.allclose(one, expected, atol=1e-6)


def test_what_has_no_parameters_is_refused(managers: list[Manager]) -> None:
    for wrong in (torch.ones(1), 3, [3]):
        with pytest.raises(TypeError, match="parameters for average_gradients"):
            managers[0].average_gradients(wrong)  # type: ignore[arg-type]
