"""A signal handler that raises anywhere in a training step: the replica goes on exactly, or says that it is torn."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
from interruptions import HandlerError, Interruption, at_every_place
from quorum_threads import LONG_S, lighthouse, make_manager, new_store, run_replicas

from manager import Manager, ManagerError, QuorumError
from manager.snapshots import scheduler

pytestmark = pytest.mark.usefixtures("quorum_ready")

RECOVERY_S = 11.0
"""Less than the ranks of one replica wait for each other."""
NUM_SAMPLES = int(os.environ.get("FT_TRANSPORT_INTERRUPTIONS", "4"))
"""A few thousand, by hand, hit every bytecode boundary."""


class Trainer:
    """A weight that says how many steps were committed."""

    def __init__(self, address: str, name: str, **keywords: Any) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        # Where gloo misses that the other one has given up, it waits for as long.
        self.manager = make_manager(address, name, timeout=timedelta(seconds=2), **keywords)
        self.manager.register("weight", torch.nn.ParameterList([self.weight]))
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def start(self) -> None:
        self.manager.start_quorum()
        self.manager.wait_quorum()

    def reduce(self) -> None:
        self.weight.grad = torch.full_like(self.weight, -1.0)
        self.manager.allreduce(self.weight.grad).wait()

    def commit(self) -> None:
        self.is_committed = False
        self.is_committed = self.manager.should_commit()

    def update(self) -> None:
        if self.is_committed:
            self.optimizer.step()

    def phases(self) -> dict[str, Callable[[], None]]:
        return {"start_quorum": self.start, "allreduce": self.reduce, "should_commit": self.commit, "step": self.update}

    def step(self) -> None:
        for phase in self.phases().values():
            phase()

    def step_and_check(self) -> None:
        self.start()
        if self.manager.errored() is None:  # else it heals next, with the other ranks of its replica
            self.check()
        self.reduce()
        self.commit()
        self.update()

    def check(self) -> None:
        assert self.weight.detach().eq(float(self.manager.current_step())).all(), (
            f"step {self.manager.current_step()} shows {self.weight.tolist()}"
        )


class Replicas:
    """A trainer that is interrupted on this thread, and a healthy replica; other ranks are on other threads."""

    def __init__(self, address: str, num_ranks: int) -> None:
        self.is_over = threading.Event()
        self.errors: list[BaseException] = []
        self._address = address
        self._stores = [new_store() for _ in range(2)]
        self._num_ranks = num_ranks
        others = [
            ("healthy", 0),
            *((name, rank) for rank in range(1, num_ranks) for name in ("healthy", "interrupted")),
        ]
        self._threads = [threading.Thread(target=self._train, args=other, daemon=True) for other in others]
        for thread in self._threads:
            thread.start()
        self.trainer = self._make("interrupted", 0)

    def _make(self, name: str, rank: int) -> Trainer:
        if self._num_ranks == 1:
            return Trainer(self._address, name)
        return Trainer(self._address, name, rank=rank, store=self._stores[name == "healthy"])

    def _train(self, name: str, rank: int) -> None:
        try:
            trainer = self._make(name, rank)
            try:
                while not self.is_over.is_set():
                    try:
                        trainer.step()
                    except QuorumError:
                        if name == "healthy":
                            raise
                        continue
                    trainer.check()
            finally:
                trainer.manager.shutdown()
        except BaseException as error:
            if not self.is_over.is_set():
                self.errors.append(error)

    def close(self) -> None:
        self.is_over.set()
        self.trainer.manager.shutdown()
        for thread in self._threads:
            thread.join(LONG_S)
        self._stores.clear()
        assert not self.errors, self.errors

    def step_together(self) -> None:
        """Until both have committed a step in one quorum."""
        deadline_s = time.monotonic() + LONG_S
        while True:
            self.trainer.step()
            if self.trainer.is_committed and self.trainer.manager.num_participants() == 2:
                return
            assert time.monotonic() < deadline_s


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with lighthouse() as address:
        made = Replicas(address, request.param)
        yield made
        made.close()


def _length_of(replicas: Replicas, name: str) -> int:
    """How many places there are in a phase."""
    interruption = Interruption(1 << 40)
    for phase_name, phase in replicas.trainer.phases().items():
        if phase_name == name:
            with interruption:
                phase()
        else:
            phase()
    return interruption.num_passed


@pytest.mark.parametrize("name", ["start_quorum", "allreduce", "should_commit", "step"])
@pytest.mark.timeout(3600)
def test_a_replica_goes_on_exactly_wherever_a_handler_raised(replicas: Replicas, name: str) -> None:
    replicas.step_together()
    length = _length_of(replicas, name)
    assert length > 20
    places = range(1, length + 1)
    for place in places if len(places) <= NUM_SAMPLES else sorted(random.sample(places, NUM_SAMPLES)):
        replicas.step_together()
        interruption = Interruption(place)
        try:
            for phase_name, phase in replicas.trainer.phases().items():
                if phase_name == name:
                    with interruption:
                        phase()
                else:
                    phase()
        except HandlerError:
            assert interruption.was_raised
        # What was interrupted as it was being reported, may have become an error of the manager's own, and a condition
        # that was interrupted while it took its lock back raises at the end of its section.
        except (ManagerError, RuntimeError):
            assert interruption.was_raised
        begin_s = time.monotonic()
        try:
            replicas.trainer.step_and_check()
            replicas.step_together()
            replicas.trainer.step_and_check()
            assert time.monotonic() - begin_s < RECOVERY_S
        except BaseException as error:
            raise AssertionError(f"after an interruption at place {place} of {length} in {name}: {error!r}") from error


class Averaging(Trainer):
    """Averages gradients of several sizes, and draws the numbers of a registered loader."""

    def __init__(self, address: str, name: str) -> None:
        loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        super().__init__(address, name)
        self.others = [torch.nn.Parameter(torch.zeros(each)) for each in (1, 3, 40)]
        self.optimizer.add_param_group({"params": self.others})
        self.loader = loader(torch.arange(1000), batch_size=None)
        self.manager.register("others", torch.nn.ParameterList(self.others))
        self.manager.register("loader", self.loader)
        self.batches = self.manager.batches(self.loader)
        self.drawn: list[int] = []
        self.gradient = -1.0

    def draw(self) -> None:
        self.drawn.append(int(next(self.batches)))

    def reduce(self) -> None:
        for parameter in (self.weight, *self.others):
            parameter.grad = torch.full_like(parameter, self.gradient)
        self.manager.average_gradients(self.optimizer)

    def check(self) -> None:
        super().check()
        assert all(bool(each.detach().eq(self.weight[0]).all()) for each in self.others)


@pytest.fixture
def alone() -> Iterator[Averaging]:
    with lighthouse() as address:
        trainer = Averaging(address, "alone")
        try:
            trainer.step()
            trainer.start()
            yield trainer
        finally:
            trainer.manager.shutdown()


@pytest.mark.timeout(120 if NUM_SAMPLES < 100 else 3600)
def test_averaging_can_be_interrupted_and_the_step_repeated(alone: Averaging) -> None:
    def check() -> None:
        alone.step_and_check()
        before = alone.manager.current_step()
        alone.step_and_check()
        assert alone.manager.current_step() == before + 1
        alone.start()

    at_every_place(alone.reduce, check, at_least=100, every=100 // NUM_SAMPLES or 1)


def test_drawing_can_be_interrupted_and_goes_on(alone: Averaging) -> None:
    def check() -> None:
        alone.reduce()
        alone.start()
        alone.draw()
        assert alone.drawn == sorted(set(alone.drawn))
        assert alone.drawn[-1] <= alone.drawn[0] + 2 * len(alone.drawn)

    at_every_place(alone.draw, check, at_least=2)


def test_a_step_whose_averages_were_not_put_back_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop goes on behind a handler's exception; the other replica has reduced the same, and commits."""
    with lighthouse(min_replicas=2) as address:
        is_over = threading.Barrier(2)
        copy = torch._foreach_copy_

        def run(name: str, gradient: float) -> list[float]:
            def interrupt(*arguments: Any) -> None:
                if threading.current_thread() is interrupted and trainer.manager.current_step() == 2:
                    monkeypatch.setattr(torch, "_foreach_copy_", copy)
                    raise HandlerError
                copy(*arguments)

            trainer = Averaging(address, name)
            trainer.gradient = gradient
            if gradient == -2.0:
                interrupted = threading.current_thread()
                monkeypatch.setattr(torch, "_foreach_copy_", interrupt)
            seen = []
            try:
                while trainer.manager.current_step() < 5:
                    trainer.start()
                    with suppress(HandlerError):
                        trainer.reduce()
                    trainer.commit()
                    trainer.update()
                    seen.append(trainer.is_committed)
                trainer.start()
                is_over.wait(LONG_S)
                return [seen.count(False), *(float(each.detach().max()) for each in (trainer.weight, *trainer.others))]
            finally:
                trainer.manager.shutdown()

        first, second = run_replicas(lambda: run("healthy", 0.0), lambda: run("interrupted", -2.0))
    assert (first[0], second[0]) == (0, 1)
    assert first[1:] == second[1:]


@pytest.mark.timeout(600 if NUM_SAMPLES < 100 else 3600)
def test_shutdown_can_be_interrupted_and_called_again() -> None:
    with lighthouse() as address:
        for place in range(1, 2000, max(1, 2000 // NUM_SAMPLES)):
            trainer = Trainer(address, f"r{place}")
            interruption = Interruption(place)
            try:
                trainer.step()
                with interruption:
                    trainer.manager.shutdown()
            except HandlerError:
                pass
            finally:
                trainer.manager.shutdown()
            if not interruption.was_raised:
                break
        assert place > 1
        assert interruption.num_passed > 20


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.timeout(300)
def test_shutdown_from_a_signal_handler_does_not_wait_for_what_it_has_interrupted() -> None:
    managers: list[Manager] = []

    def shut_down(_signum: int, _frame: FrameType | None) -> None:
        for manager in managers:
            manager.shutdown()
        managers.clear()

    before = signal.signal(signal.SIGALRM, shut_down)
    try:
        with lighthouse() as address:
            for number in range(4):
                trainer = Trainer(address, f"r{number}")
                trainer.step()
                managers.append(trainer.manager)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.02))
                start_s = time.monotonic()
                try:
                    while managers:
                        trainer.step()
                    trainer.step()
                except (ManagerError, RuntimeError):
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                trainer.manager.shutdown()
                assert time.monotonic() - start_s < 15
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.parametrize("error", [RuntimeError, TimeoutError, KeyboardInterrupt])
def test_a_handlers_exception_leaves_the_wait_for_the_lighthouse_at_once(error: type[BaseException]) -> None:
    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise error("of the handler")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with lighthouse(min_replicas=2) as address:
            trainer = Trainer(address, "alone", quorum_timeout=timedelta(seconds=30))
            begin_s = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(error, match="of the handler"):
                trainer.start()
            trainer.manager.shutdown()
            assert time.monotonic() - begin_s < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_exception_that_is_kept_keeps_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager keeps it, and perhaps the caller, with the frame that has just opened a section of the lock."""

    def interrupt(*_arguments: object) -> None:
        monkeypatch.undo()
        raise HandlerError

    with lighthouse() as address:
        trainer = Trainer(address, "alone")
        trainer.step()
        trainer.step()
        gc.disable()
        try:
            monkeypatch.setattr(scheduler, "HeldBoundary", interrupt)
            with pytest.raises(HandlerError) as _kept:
                trainer.start()
            begin_s = time.monotonic()
            trainer.step()
            assert time.monotonic() - begin_s < 1
            trainer.start()
            trainer.check()
        finally:
            gc.enable()
            trainer.manager.shutdown()
