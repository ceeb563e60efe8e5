"""Where a loop draws its batches: each step trains on the batch that its loader's state says, or is refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import beside, lighthouse, make_manager
from torch.utils.data import DataLoader

from ft_transport import CheckpointStore
from manager import LoaderOrderError, Manager, RegistryError, StateManager

StatefulDataLoader: Any = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

pytestmark = [
    pytest.mark.usefixtures("quorum_ready"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Trainer:
    """A model, and a loader that deals numbers in an order of its own."""

    def __init__(self, manager: StateManager, *, scope: Any, num_batches: int = 64, shuffle: bool = True) -> None:
        self.manager = manager
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.loader = StatefulDataLoader(
            torch.arange(float(num_batches))[:, None],
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(7),
        )
        self.drawn: list[tuple[int, int]] = []
        manager.register("model", self.model)
        manager.register("optimizer", self.optimizer)
        manager.register("loader", self.loader, scope=scope)
        manager.attach(self.optimizer)

    def backward(self, batch: torch.Tensor) -> None:
        self.drawn.append((self.manager.current_step(), int(batch)))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()

    def quorum_step(self, draw: Callable[[], torch.Tensor]) -> None:
        assert isinstance(self.manager, Manager)
        self.manager.start_quorum()
        self.backward(draw())
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad).wait()
        if self.manager.should_commit():
            self.optimizer.step()


def _alone(root: Path | None, **keywords: Any) -> StateManager:
    if root is None:
        return StateManager(**keywords)
    return StateManager(checkpoint_store=CheckpointStore(root), save_every=5, **keywords)


@pytest.mark.parametrize("num_batches", [8, 64])
def test_a_resumed_run_draws_what_comes_next(tmp_path: Path, num_batches: int) -> None:
    """Over the end of an epoch as well."""

    def run(root: Path, until: int) -> list[tuple[int, int]]:
        # torchdata itself shuffles the epoch after a load in another order.
        trainer = Trainer(_alone(root), scope="local", num_batches=num_batches, shuffle=num_batches > 20)
        manager = trainer.manager
        batches = manager.batches(trainer.loader)
        manager.resume()
        for step in range(manager.current_step(), until):
            manager.start_step(step)
            trainer.backward(next(batches))
            trainer.optimizer.step()
        manager.start_step(until)
        manager.shutdown()
        return trainer.drawn

    whole = run(tmp_path / "whole", 20)

    first, second, third = (run(tmp_path / "cut", until) for until in (5, 15, 20))

    assert first + second + third == whole
    assert len({batch for _, batch in whole}) == min(num_batches, 20)


def _loop_over(batches: Iterable[Any], manager: StateManager) -> None:
    for step, _ in enumerate(batches, manager.current_step()):
        manager.start_step(step)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_batch_before_the_boundary_is_refused_at_once(tmp_path: Path, is_resumed: bool) -> None:
    """It was saved as if the step had trained on it: a resumed run began with the batch after the next."""
    if is_resumed:
        earlier = Trainer(_alone(tmp_path), scope="local")
        batches = earlier.manager.batches(earlier.loader)
        for step in range(5):
            earlier.manager.start_step(step)
            next(batches)
        earlier.manager.start_step(5)
        earlier.manager.shutdown()
    trainer = Trainer(_alone(tmp_path), scope="local")
    recovery = trainer.manager.resume()
    assert (recovery is not None) == is_resumed

    with pytest.raises(
        LoaderOrderError, match=r"no batch from the loader 'loader' .* manager\.batches\(loader\)"
    ) as got:
        _loop_over(trainer.loader, trainer.manager)

    trainer.manager.shutdown()
    assert got.value.key == "loader"


def test_what_nobody_saves_or_sends_may_be_drawn_anywhere() -> None:
    trainer = Trainer(_alone(None), scope="local", num_batches=3)

    for step, batch in enumerate(trainer.loader):
        trainer.manager.start_step(step)
        trainer.backward(batch)
        trainer.optimizer.step()

    assert len(trainer.drawn) == 3
    trainer.manager.shutdown()


def test_an_iterator_from_before_a_resume_is_refused(tmp_path: Path) -> None:
    earlier = Trainer(_alone(tmp_path), scope="local")
    earlier.manager.start_step(5)
    earlier.manager.shutdown()
    trainer = Trainer(_alone(tmp_path), scope="local")
    batches = iter(trainer.loader)
    trainer.manager.resume()

    with pytest.raises(LoaderOrderError, match="an iterator that was made before a load"):
        trainer.manager.start_step(5)
    del batches
    # One that nobody holds any more does no harm.
    trainer.manager.resume()
    trainer.manager.start_step(5)
    trainer.manager.shutdown()


class Numbers:
    """A loader of one's own, that counts what it yields."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Stream(Numbers):
    """One that is its own iterator."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_loader_of_ones_own_is_named_in_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: type[Numbers]
) -> None:
    manager, numbers = _alone(tmp_path), kind()
    manager.register("model", torch.nn.Linear(1, 1))
    manager.register("numbers", numbers, scope="local")
    for step, _ in zip(range(3), numbers, strict=False):
        manager.start_step(step)
    manager.shutdown()

    assert caplog.text.count("expected no batch from the loader 'numbers'") == 1


class ReplayBuffer:
    """Iterable, and no loader."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.num_calls = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def state_dict(self) -> dict[str, list[int]]:
        self.num_calls += 1
        return {"items": list(self.items)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.items = state["items"]


def test_what_changes_before_the_first_boundary_without_being_drawn_from_is_no_mistake(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    manager, buffer, numbers = _alone(tmp_path), ReplayBuffer(), Numbers()
    manager.register("model", torch.nn.Linear(1, 1))
    manager.register("buffer", buffer, scope="local")
    manager.register("numbers", numbers, scope="local")
    assert not buffer.num_calls, "its state may be large"
    buffer.items += [1, 2, 3]
    batches = iter(numbers)
    for step in range(4):
        manager.start_step(step)
        buffer.items += [number for number in buffer if number < 3]
        next(batches)
        if step == 1:
            num_calls = buffer.num_calls
    assert buffer.num_calls == num_calls
    manager.shutdown()

    assert "numbers" not in caplog.text
    assert "buffer" not in caplog.text


class OwnState(DataLoader[Any]):
    """A loader of torch's with a state of the user's."""

    def __init__(self) -> None:
        super().__init__(range(8), batch_size=None)
        self.first = 0

    def __iter__(self) -> Any:
        for number in super().__iter__():
            if number >= self.first:
                self.first = number + 1
                yield number
        self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


def _nodes(prefetched: int) -> Any:
    from torchdata import nodes

    numbers = nodes.IterableWrapper(range(8))
    return nodes.Loader(nodes.Prefetcher(numbers, prefetched) if prefetched else numbers)


@pytest.mark.parametrize(
    ("make", "scope"),
    [(Numbers, "local"), (OwnState, "replicated"), (lambda: _nodes(0), "replicated"), (lambda: _nodes(2), "local")],
)
def test_other_loaders_go_on_after_a_resume(tmp_path: Path, make: Callable[[], Any], scope: Any) -> None:
    """A loader of torchdata's nodes that has told its state ignores the next state that it loads."""

    def run(until: int) -> list[int]:
        loader, manager, drawn = make(), _alone(tmp_path), []
        manager.register("model", torch.nn.Linear(1, 1))
        manager.register("loader", loader, scope=scope)
        manager.resume()
        batches = manager.batches(loader)
        for step in range(manager.current_step(), until):
            manager.start_step(step)
            drawn.append(int(next(batches)))
        manager.start_step(until)
        manager.shutdown()
        return drawn

    first, second = run(5), run(8)

    assert second == list(range(first[-1] + 1, first[-1] + 4))


def test_the_loop_over_a_loader_of_nodes_is_refused(tmp_path: Path) -> None:
    manager, loader = _alone(tmp_path), _nodes(0)
    manager.register("model", torch.nn.Linear(1, 1))
    manager.register("loader", loader, scope="local")
    with pytest.raises(LoaderOrderError, match="no batch from the loader 'loader'"):
        _loop_over(loader, manager)
    manager.shutdown()


def test_batches_are_those_of_a_registered_loader() -> None:
    manager = _alone(None)
    with pytest.raises(RegistryError, match=r"expected a registered loader, got a list"):
        manager.batches([1, 2])
    manager.shutdown()


def test_a_healed_replica_draws_the_batches_of_its_source(address: str) -> None:
    def replica(name: str) -> tuple[Trainer, Callable[[], None]]:
        trainer = Trainer(make_manager(address, name), scope="replicated")
        batches = trainer.manager.batches(trainer.loader)
        return trainer, lambda: trainer.quorum_step(lambda: next(batches))

    def newcomer() -> list[tuple[int, int]]:
        late, step = replica("replica_1")
        try:
            for _ in range(5):
                step()
            return late.drawn
        finally:
            late.manager.shutdown()

    first, step = replica("replica_0")
    try:
        late = beside(step, newcomer, num_steps=4)
    finally:
        first.manager.shutdown()
    assert late[0][0] >= 4
    begin = first.drawn.index(late[0])
    assert late == first.drawn[begin : begin + len(late)]


def test_a_replicated_loader_needs_batches_that_follow_it() -> None:
    """Said before the first quorum: otherwise the first newcomer would find out, and train on batch 0 and on."""
    with lighthouse() as address:
        trainer = Trainer(make_manager(address, "replica_0"), scope="replicated")
        batches = iter(trainer.loader)
        with pytest.raises(LoaderOrderError, match="an iterator that was made without the manager"):
            trainer.quorum_step(lambda: next(batches))
        trainer.manager.shutdown()


@pytest.mark.parametrize("scope", ["local", "replicated"])
def test_the_loop_over_the_loader_is_refused_before_its_first_quorum(tmp_path: Path, scope: str) -> None:
    with lighthouse() as address:
        trainer = Trainer(make_manager(address, "replica_0", checkpoint_store=CheckpointStore(tmp_path)), scope=scope)
        batches = trainer.manager.batches(trainer.loader)
        batch = next(iter(batches))
        with pytest.raises(LoaderOrderError, match="before the step boundary"):
            trainer.quorum_step(lambda: batch)
        trainer.manager.shutdown()


def test_a_loader_that_was_read_to_its_end_is_where_it_was_and_one_has_one_iterator(tmp_path: Path) -> None:
    trainer = Trainer(_alone(tmp_path), scope="local")
    evaluation = StatefulDataLoader(torch.arange(4.0)[:, None])
    trainer.manager.register("evaluation", evaluation, scope="local")
    batches = trainer.manager.batches(trainer.loader)
    for step in range(3):
        assert len(list(evaluation)) == 4
        trainer.manager.start_step(step)
        trainer.backward(next(batches))
        trainer.optimizer.step()
    next(iter(trainer.loader))
    with pytest.raises(LoaderOrderError, match="to be the only iterator of the loader 'loader'"):
        trainer.manager.start_step(3)
    trainer.manager.shutdown()


class Values(torch.utils.data.Dataset[torch.Tensor]):
    """Fails in the worker process at one index."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("broken sample")
        return torch.tensor([float(index)])


def _worker_ids() -> set[int]:
    return {process.pid or 0 for process in multiprocessing.active_children()}


@pytest.mark.parametrize(("persistent", "fails"), [(False, True), (True, False)])
# Python 3.12 and later warn of forks beside threads.
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_workers_of_the_old_iterator_end_with_it(tmp_path: Path, persistent: bool, fails: bool) -> None:
    """Also where an exception that the loop handles still holds the iterator."""
    others = _worker_ids()
    loader = StatefulDataLoader(Values(7 if fails else None), num_workers=2, persistent_workers=persistent)
    manager = _alone(tmp_path)
    manager.register("model", torch.nn.Linear(1, 1))
    manager.register("loader", loader, scope="local")
    batches = manager.batches(loader)
    failure: Exception | None = None

    def train(batches: Iterator[torch.Tensor], until: int) -> None:
        for step in range(manager.current_step(), until):
            manager.start_step(step)
            assert int(next(batches)) == step
        manager.start_step(until)

    try:
        train(batches, 5)
        manager.save(wait=True, overwrite=True)
        train(batches, 8)
    except ValueError as error:
        failure = error
    assert (failure is not None) == fails
    old = _worker_ids() - others
    assert len(old) == 2

    manager.resume()

    assert not old & _worker_ids()
    train(batches, 7 if not fails else 6)
    assert len(_worker_ids() - others) == 2
    manager.shutdown()
    assert _worker_ids() == others
    assert int(next(batches)) == (6 if fails else 7), "the loader stands where it stood"
    manager.shutdown()
    assert _worker_ids() == others
