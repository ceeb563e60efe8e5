"""The same batches in the same steps, whichever replicas train them, with real loaders and a real quorum."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import Trainer, lighthouse, new_store, run_replicas
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Dataset

from manager import (
    ConfigError,
    ElasticBatches,
    ElasticSampler,
    ManagerError,
    ReductionMismatchError,
    RegistryError,
    StateManager,
    WorldSizeMode,
)
from manager.state.elastic_sampler import Place

NUM_SAMPLES = 40
_INDICES = torch.arange(NUM_SAMPLES)


def sampler(num_microbatches: int = 6, **arguments: Any) -> ElasticSampler:
    return ElasticSampler(NUM_SAMPLES, batch_size=2, num_microbatches=num_microbatches, seed=5, **arguments)


def loader_of(chosen: ElasticSampler, num_workers: int = 0) -> DataLoader[torch.Tensor]:
    return DataLoader(_INDICES, batch_sampler=chosen, num_workers=num_workers)  # type: ignore[arg-type]


@pytest.fixture
def manager() -> Iterator[StateManager]:
    found = StateManager()
    yield found
    found.shutdown()


def expected(step: int, place: Place, chosen: ElasticSampler) -> list[list[int]]:
    return [chosen.samples(start) for start in chosen.starts(step, place)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_change_of_place_drops_what_was_prefetched_for_another(
    manager: StateManager, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = sampler()
    manager.register("sampler", chosen)
    batches = ElasticBatches(manager, loader_of(chosen, num_workers))
    places = [Place(0, 2), Place(0, 2), Place(1, 3), Place(None, 3), Place(0, 1), Place(2, 3)]
    for step, place in enumerate(places):
        monkeypatch.setattr(batches, "_place", lambda place=place: place)
        manager.start_step(step)
        assert len(batches) == len(chosen.starts(step, place))
        assert [batch.tolist() for batch in batches] == expected(step, place, chosen)
    # Without workers, a loader loads only what it returns.
    assert (chosen.num_dropped > 0) == (num_workers > 0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_after_a_replica_joins_nothing_is_loaded_for_it(
    manager: StateManager, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = sampler()
    manager.register("sampler", chosen)
    batches = ElasticBatches(manager, loader_of(chosen, num_workers))
    dropped = []
    for step in range(12):
        place = Place(0, 1) if step < 3 else Place(0, 2) if step < 8 else Place(1, 3)
        monkeypatch.setattr(batches, "_place", lambda place=place: place)
        manager.start_step(step)
        assert [batch.tolist() for batch in batches] == expected(step, place, chosen)
        dropped.append(chosen.num_dropped)
    window = 2 * num_workers  # the prefetch factor of a DataLoader is 2
    assert dropped[2] == 0
    assert 0 < dropped[5] == dropped[7] <= window
    assert dropped[10] == dropped[11] <= 2 * window


def test_a_repeated_step_has_the_same_batches_and_drops_nothing(
    manager: StateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = sampler()
    manager.register("sampler", chosen)
    batches = ElasticBatches(manager, loader_of(chosen, num_workers=1))
    manager.start_step(0)
    first = list(batches)
    assert all(one is other for one, other in zip(batches, first, strict=True))
    monkeypatch.setattr(batches, "_place", lambda: Place(0, 2))
    assert [each.tolist() for each in batches] == expected(0, Place(0, 2), chosen)
    monkeypatch.undo()
    manager.start_step(1)
    assert [each.tolist() for each in batches] == expected(1, Place(), chosen)
    assert chosen.num_dropped == 0


def test_a_resumed_run_of_another_world_size_draws_the_rest() -> None:
    """Each rank without a quorum has a part of the step."""
    seen: list[int] = []
    state: dict[str, object] = {}
    for begin, end, num_ranks in ((0, 3, 2), (3, 5, 3), (5, 10, 1)):
        states = []
        for rank in range(num_ranks):
            manager = StateManager()
            chosen = sampler(rank=rank, num_ranks=num_ranks)
            manager.register("sampler", chosen)
            if state:
                manager.load(state)
            batches = ElasticBatches(manager, loader_of(chosen))
            for step in range(begin, end):
                manager.start_step(step)
                seen += [index for batch in batches for index in batch.tolist()]
            states.append(manager.replica_state())
            manager.shutdown()
        state = states[0]
    assert sorted(seen) == sorted(list(range(NUM_SAMPLES)) * 3)


class Faulty(Dataset[torch.Tensor]):
    """Fails when a file exists, and then removes it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._file.exists():
            self._file.unlink()
            raise OSError("a disk that fails once")
        return _INDICES[index]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_cannot_be_loaded_shifts_no_other(manager: StateManager, num_workers: int, tmp_path: Path) -> None:
    chosen = sampler()
    manager.register("sampler", chosen)
    file = tmp_path / "fault"
    loader: DataLoader[torch.Tensor] = DataLoader(Faulty(file), batch_sampler=chosen, num_workers=num_workers)
    batches = ElasticBatches(manager, loader)
    for step in range(8):
        manager.start_step(step)
        if step in {1, 4}:
            file.touch()
        for _ in range(2):
            try:
                drawn = [each.tolist() for each in batches]
                break
            except OSError:
                assert not file.exists()
        assert drawn == expected(step, Place(), chosen)


def test_iterators_of_one_sampler_do_not_disturb_each_other(manager: StateManager) -> None:
    chosen = sampler()
    manager.register("sampler", chosen)
    loader = loader_of(chosen, num_workers=1)
    lasting = ElasticBatches(manager, loader)
    for step in range(4):
        manager.start_step(step)
        drawing = iter(lasting)
        first = next(drawing)
        assert [each.tolist() for each in ElasticBatches(manager, loader)] == expected(step, Place(), chosen)
        assert [each.tolist() for each in (first, *drawing)] == expected(step, Place(), chosen)


def test_what_was_prefetched_in_another_order_is_dropped(manager: StateManager) -> None:
    chosen = sampler()
    manager.register("sampler", chosen)
    batches = ElasticBatches(manager, loader_of(chosen, num_workers=2))
    manager.start_step(0)
    before = [each.tolist() for each in batches]
    chosen.load_state_dict(chosen.state_dict() | {"seed": 9})
    manager.start_step(0)
    after = [each.tolist() for each in batches]
    assert before != after == expected(0, Place(), chosen)


def test_a_wrong_loader_is_refused(manager: StateManager) -> None:
    chosen = sampler()
    with pytest.raises(RegistryError, match=r"manager\.register\('sampler', sampler\)"):
        ElasticBatches(manager, loader_of(chosen))
    manager.register("sampler", chosen)
    with pytest.raises(ConfigError, match=r"ElasticSampler.*got one with BatchSampler"):
        ElasticBatches(manager, DataLoader(_INDICES, batch_size=2))  # type: ignore[arg-type]
    with pytest.raises(ManagerError, match="expected the loop to draw from ElasticBatches"):
        next(iter(loader_of(chosen)))


class Replica(Trainer):
    """Fits a line, and notes the samples of each committed step."""

    def __init__(
        self, address: str, name: str, num_microbatches: int, *, chosen: ElasticSampler | None = None, **keywords: Any
    ) -> None:
        model = nn.Linear(1, 1).double()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        super().__init__(address, name, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), **keywords)
        self.sampler = chosen if chosen is not None else sampler(num_microbatches)
        self.manager.register("sampler", self.sampler)
        self.batches = ElasticBatches(self.manager, loader_of(self.sampler))
        self.seen: list[int] = []
        self.is_failing = False

    def backward(self) -> None:
        self.seen = []
        for batch in self.batches:
            self.seen += batch.tolist()
            inputs = batch.double()[:, None] / NUM_SAMPLES
            ((self.model(inputs) - 3 * inputs).square().mean() / len(self.batches)).backward()
        if self.is_failing:
            self.is_failing = False
            self.manager.report_error(RuntimeError("a failing step"))
        self.manager.average_gradients(self.model)

    def step(self) -> bool:
        self.manager.start_quorum()
        self.optimizer.zero_grad()
        self.backward()
        is_committed = self.manager.should_commit()
        if is_committed:
            self.optimizer.step()
        return is_committed


def weights_of(replica: Replica) -> list[float]:
    return [each.item() for each in replica.model.parameters()]


@pytest.mark.usefixtures("quorum_ready")
@pytest.mark.parametrize("num_microbatches", [1, 4, 6])
def test_a_run_with_failures_trains_the_batches_of_a_run_without(num_microbatches: int) -> None:
    num_steps = 14
    with lighthouse() as address:
        alone = Replica(address, "alone", num_microbatches)
        weights = []
        for _ in range(num_steps):
            assert alone.step()
            weights.append(weights_of(alone))
        alone.manager.shutdown()
    seen: dict[int, list[int]] = defaultdict(list)
    mutex = threading.Lock()
    followed = threading.Event()

    def run(replica: Replica, end: int, *, fails_at: int = -1) -> None:
        try:
            while (step := replica.manager.current_step()) < end:
                replica.is_failing = step == fails_at
                fails_at = -1 if replica.is_failing else fails_at
                if not replica.step():
                    continue
                with mutex:
                    # The replicas heal to the present step in their first quorum.
                    seen[replica.manager.current_step() - 1] += replica.seen
                assert weights_of(replica) == pytest.approx(weights[replica.manager.current_step() - 1], rel=1e-12)
                if replica.manager.num_participants() == 3:
                    followed.set()
        finally:
            replica.manager.shutdown()

    with lighthouse() as address:

        def late() -> None:
            assert followed.wait(60)
            run(Replica(address, "d", num_microbatches), num_steps)

        a, b, c = (Replica(address, name, num_microbatches) for name in "abc")
        run_replicas(lambda: run(a, num_steps, fails_at=7), lambda: run(b, num_steps), lambda: run(c, 5), late)
    for step in range(num_steps):
        start = step * num_microbatches
        expected_samples = [
            index for each in range(num_microbatches) for index in a.sampler.samples(2 * (start + each))
        ]
        assert sorted(seen[step]) == sorted(expected_samples), step


@pytest.mark.usefixtures("quorum_ready")
def test_the_ranks_of_each_replica_draw_different_microbatches() -> None:
    """Three rounds of two microbatches: one replica has two rounds, and the other one has one."""
    num_steps, num_ranks, num_microbatches = 6, 2, 6

    def run(address: str, name: str, rank: int, store: TCPStore, num_replicas: int) -> list[tuple[list[int], float]]:
        chosen = sampler(num_microbatches, rank=rank, num_ranks=num_ranks)
        replica = Replica(address, name, num_microbatches, chosen=chosen, store=store, rank=rank)
        found = []
        try:
            while replica.manager.current_step() < num_steps:
                # The first steps may have one replica.
                if replica.step():
                    assert replica.manager.num_participants() <= num_replicas
                    found.append((replica.seen, weights_of(replica)[0]))
        finally:
            replica.manager.shutdown()
        return found

    runs = {}
    for names in ("a", "bc"):
        stores = {name: new_store() for name in names}
        with lighthouse(min_replicas=len(names)) as address:
            runs[names] = run_replicas(
                *(
                    partial(run, address, name, rank, stores[name], len(names))
                    for name in names
                    for rank in range(num_ranks)
                )
            )
    for step in range(num_steps):
        alone = [run[step] for run in runs["a"]]
        both = [run[step] for run in runs["bc"]]
        for rank in range(num_ranks):
            parts = [both[rank], both[num_ranks + rank]]
            assert sorted(index for samples, _ in parts for index in samples) == sorted(alone[rank][0])
            assert [weight for _, weight in parts] == pytest.approx([alone[rank][1]] * 2, rel=1e-12)
        drawn = sorted(index for samples, _ in both for index in samples)
        whole = sampler(num_microbatches)
        assert drawn == sorted(index for start in whole.starts(step, Place()) for index in whole.samples(start))


@pytest.mark.usefixtures("quorum_ready")
def test_replicas_with_other_microbatches_do_not_average() -> None:
    errors: list[BaseException] = []

    def run(replica: Replica) -> None:
        try:
            for _ in range(2):
                if not replica.step():
                    errored = replica.manager.errored()
                    assert errored is not None
                    errors.append(errored.original_exception)
                    return
        finally:
            replica.manager.shutdown()

    with lighthouse(min_replicas=2) as address:
        one = Replica(address, "a", 6)
        other = Replica(address, "b", 6, chosen=ElasticSampler(NUM_SAMPLES, batch_size=4, num_microbatches=6, seed=5))
        run_replicas(lambda: run(one), lambda: run(other))
    assert errors
    assert any(isinstance(each, ReductionMismatchError) for each in errors)


@pytest.mark.usefixtures("quorum_ready")
def test_an_average_before_the_last_microbatch_is_refused() -> None:
    with lighthouse() as address:
        replica = Replica(address, "a", 2)
        manager = replica.manager
        manager.start_quorum()
        drawing = iter(replica.batches)
        next(drawing)
        with pytest.raises(ManagerError, match="expected the loop to average after its last microbatch"):
            manager.allreduce(torch.zeros(1))
        next(drawing)
        manager.allreduce(torch.zeros(1)).wait()
        assert manager.should_commit()
        replica.optimizer.step()
        manager.shutdown()


@pytest.mark.usefixtures("quorum_ready")
def test_a_spare_follows_a_resumed_run_with_other_steps() -> None:
    """A spare draws nothing until another replica dies."""
    seen: dict[int, list[int]] = defaultdict(list)
    mutex = threading.Lock()
    before = sampler(6)
    state = before.state_dict() | {"step": 5, "position": 60}

    def run(replica: Replica, end: int) -> None:
        try:
            replica.manager._state.step = 5
            replica.sampler.load_state_dict(state)
            while replica.manager.current_step() < end:
                if replica.step():
                    with mutex:
                        seen[replica.manager.current_step() - 1] += replica.seen
        finally:
            replica.manager.shutdown()

    with lighthouse(min_replicas=2) as address:
        fixed = {"min_replica_size": 2, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
        replicas = [
            Replica(
                address,
                name,
                2,
                chosen=ElasticSampler(NUM_SAMPLES, batch_size=5, num_microbatches=2, seed=5),
                **fixed,
            )
            for name in "abc"
        ]
        run_replicas(
            *(lambda each=each, end=end: run(each, end) for each, end in zip(replicas, (8, 12, 12), strict=True))
        )
    position = 60
    for step in range(5, 12):
        order = [index for start in (position, position + 5) for index in replicas[1].sampler.samples(start)]
        assert sorted(seen[step]) == sorted(order), step
        position += 10


@pytest.mark.usefixtures("quorum_ready")
def test_microbatches_are_asked_for_once_and_in_time() -> None:
    with lighthouse() as address:
        replica = Replica(address, "a", 6)
        manager = replica.manager
        manager.start_quorum()
        assert manager.num_microbatches(6) == manager.num_microbatches(6) == 6
        with pytest.raises(ManagerError, match="expected one positive number of microbatches in each step, got 4"):
            manager.num_microbatches(4)
        assert manager.should_commit()
        replica.optimizer.step()
        manager.start_quorum()
        manager.allreduce(torch.zeros(1)).wait()
        with pytest.raises(ManagerError, match="before the first allreduce"):
            manager.num_microbatches(6)
        manager.shutdown()


def test_batches_by_number_are_divided_like_samples(manager: StateManager, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(Dataset[torch.Tensor]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((3,), index)

    chosen = ElasticSampler(1 << 60, batch_size=1, num_microbatches=4, shuffle=False)
    manager.register("sampler", chosen)
    loader = DataLoader(Stream(), batch_sampler=chosen, collate_fn=lambda batches: batches[0])
    batches = ElasticBatches(manager, loader)
    monkeypatch.setattr(batches, "_place", lambda: Place(1, 3))
    manager.start_step(7)
    assert [each.tolist() for each in batches] == [[29, 29, 29]]
