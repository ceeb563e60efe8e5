"""A manager with a checkpoint store: what it saves, how it resumes, and where it recovers from when nobody is alive."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import manager_checkpoint_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from made_objects import made
from programs import start_writers
from ranks import run_ranks, run_torchrun
from torch import nn

from ft_transport import (
    CheckpointDamagedError,
    CheckpointStore,
    HTTPTransport,
    Limits,
    StoreSettings,
    TransportSettings,
    state_digest,
)
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.state.snapshot import HeldState
from manager import ConfigError, ManagerError, RandomState, RecoveryFailedError, StateManager

_TIMEOUT = timedelta(seconds=30)
_NOBODY = "http://127.0.0.1:9/checkpoint/"


class Loader:
    """Deals numbers in an order that belongs to this rank."""

    def __init__(self) -> None:
        self.random = random.Random(5)
        self.num_drawn = 0
        self.drawn: list[float] = []

    def draw(self) -> float:
        self.num_drawn += 1
        self.drawn.append(self.random.random())
        return self.drawn[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]
        self.random.setstate(state["random"])


class Replica:
    """A trainer with everything that a resume has to bring back."""

    def __init__(self, root: Path | None, *, transport: bool = True, **keywords: Any) -> None:
        torch.manual_seed(1)
        random.seed(1)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.loader = Loader()
        self.store = CheckpointStore(root, settings=StoreSettings(timeout=_TIMEOUT)) if root is not None else None
        self.transport: HTTPTransport[Any] | None = None
        if transport:
            self.transport = HTTPTransport(_TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
        self.manager = StateManager(
            checkpoint_transport=self.transport,
            timeout=_TIMEOUT,
            checkpoint_store=self.store,
            **keywords,
        )
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.register("scheduler", self.scheduler)
        self.manager.register("loader", self.loader, scope="local")
        self.manager.register("random", RandomState(), scope="local")
        self.attachment = self.manager.attach(self.optimizer)

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.manager.start_step(step)
            batch = torch.randn(8, 64) + self.loader.draw()
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        self.manager.start_step(end)

    def digest(self) -> str:
        return str(state_digest([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]))

    def close(self) -> None:
        self.attachment.remove()
        self.manager.shutdown()


@contextmanager
def replica(root: Path | None, **keywords: Any) -> Iterator[Replica]:
    trainer = Replica(root, **keywords)
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.fixture(params=[True, False], ids=["with a transport", "without"])
def transport(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_resume_is_exact_in_state_and_order_of_data(tmp_path: Path, transport: bool) -> None:
    with replica(tmp_path / "straight", transport=transport) as straight:
        straight.train(0, 12)
        expected, drawn = straight.digest(), straight.loader.drawn
    with replica(tmp_path / "cut", transport=transport, save_every=5) as first:
        first.train(0, 8)
        assert first.store is not None
        first.store.wait()
    with replica(tmp_path / "cut", transport=transport, save_every=5) as second:
        torch.rand(7)
        recovery = second.manager.resume()
        assert recovery is not None
        assert (recovery.step, second.manager.current_step(), second.loader.num_drawn) == (5, 5, 5)
        second.train(5, 12)
        assert second.digest() == expected
        assert second.loader.drawn == drawn[5:]


def test_what_is_saved_is_the_snapshot_that_peers_are_served(tmp_path: Path) -> None:
    with replica(tmp_path) as source:
        source.train(0, 3)
        source.manager.save(wait=True)
        transport = source.transport
        assert transport is not None
        assert transport.server.newest_step() == 3
        num_snapshots = transport.server.newest_sequence()
        with replica(None) as newcomer:
            assert newcomer.manager.recover(source.manager.metadata()).step == 3
            assert newcomer.digest() == source.digest()
        # The newcomer's request was answered with it.
        assert transport.server.newest_sequence() == num_snapshots == 1
        rank = json.loads((tmp_path / "step-3" / "rank-0.json").read_bytes())
        served = transport.server.lease(3)
        served.release()
        assert rank["parts"][0]["header"]["__metadata__"]["ft_transport.step"] == "3"
        assert len(rank["parts"]) == 2, "what is local is beside it"


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path, transport: bool) -> None:
    with replica(tmp_path, transport=transport) as trainer:
        trainer.train(0, 2)
        expected = trainer.digest()
        handle = trainer.manager.save()
        trainer.train(2, 6)
        handle.result(_TIMEOUT)
        assert trainer.digest() != expected
        assert trainer.manager.resume() is not None
        assert trainer.digest() == expected


def test_live_peers_come_first_then_a_checkpoint_then_a_clear_failure(tmp_path: Path) -> None:
    with replica(tmp_path / "own") as trainer, replica(None) as peer:
        with pytest.raises(RecoveryFailedError, match=r"a live peer or a checkpoint .* there is no checkpoint"):
            trainer.manager.recover(_NOBODY, timeout=timedelta(seconds=0.5))
        trainer.train(0, 2)
        trainer.manager.save(wait=True)
        saved = trainer.digest()
        trainer.train(2, 4)
        peer.train(0, 7)
        peer.manager.snapshot(7).result(30)
        assert trainer.manager.recover(peer.manager.metadata()).step == 7
        assert trainer.digest() == peer.digest()
        recovery = trainer.manager.recover(_NOBODY, timeout=timedelta(seconds=0.5))
        assert (recovery.step, trainer.digest()) == (2, saved)
        assert str(tmp_path / "own") in recovery.source


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    with replica(tmp_path) as trainer:
        trainer.train(0, 2)
        trainer.manager.save(wait=True)
        saved = trainer.digest()
        trainer.train(2, 3)
        trainer.manager.save(wait=True)
        _flip(tmp_path / "step-3" / "__0_0.distcp", 5000)
        trainer.train(3, 4)
        recovery = trainer.manager.resume()
        assert recovery is not None
        assert (recovery.step, trainer.digest()) == (2, saved)
        _flip(tmp_path / "step-2" / "__0_0.distcp", 5000)
        with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp"):
            trainer.manager.resume()
        # It was found before anything of it had landed.
        assert trainer.digest() == saved
        trainer.manager.start_step(5)


def test_a_save_at_the_step_that_was_resumed_keeps_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with replica(tmp_path, transport=False) as first:
        first.train(0, 2)
        first.manager.start_step(2)
        first.manager.save(wait=True)
    with replica(tmp_path, transport=False) as second:
        second.manager.resume()
        handle = second.manager.save(wait=True)
        assert (handle.step, handle.is_skipped, handle.exception()) == (2, True, None)
        assert "could not be saved" not in caplog.text
        assert not second.manager.save(wait=True, overwrite=True).is_skipped
        second.manager.start_step(3)
        assert not second.manager.save(wait=True).is_skipped


@pytest.mark.parametrize("save_every", [0, -1, True, 2.5])
def test_settings_that_cannot_work_are_refused(tmp_path: Path, save_every: Any) -> None:
    with CheckpointStore(tmp_path) as store, pytest.raises(ConfigError):
        StateManager(checkpoint_store=store, save_every=save_every)
    with pytest.raises(ConfigError):
        StateManager(save_every=5)


def test_without_a_store_there_is_nothing_to_save_to() -> None:
    manager = StateManager()
    for method in (manager.save, manager.resume):
        with pytest.raises(ManagerError, match="checkpoint_store"):
            method()


def test_a_dead_writer_is_told_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with made(WriterProcess) as writers, replica(tmp_path) as trainer:
        trainer.train(0, 1)
        assert trainer.store is not None
        (writer,) = writers
        killed = writer.process_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        while writer.is_alive() and writer.process_id == killed:
            time.sleep(0.005)
        trainer.manager.start_step(1)
        trainer.manager.start_step(1)
        assert "writer processes of ranks (0,) have died" in caplog.text
        trainer.manager.save(wait=True)
        assert trainer.store.latest() == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_writer_process_imports_torch_only_for_values_of_torch(tmp_path: Path) -> None:
    def maps_torch() -> bool:
        return "libtorch" in Path(f"/proc/{writer.process_id}/maps").read_text()

    with start_writers(), made(WriterProcess) as writers, replica(tmp_path) as trainer:
        trainer.train(0, 1)
        (writer,) = writers
        trainer.manager.save(wait=True)
        assert not maps_torch()
        trainer.manager.register_state_dict_fn("dtype", lambda _state: None, lambda: {"dtype": torch.bfloat16})
        trainer.train(1, 2)
        trainer.manager.save(wait=True)
        assert maps_torch()
        assert trainer.store is not None
        state: dict[str, Any] = {"user": {"dtype": {"dtype": None}}}
        dcp.load(state, checkpoint_id=tmp_path / "step-2")
        assert state["user"]["dtype"]["dtype"] is torch.bfloat16


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("launch", [run_ranks, pytest.param(run_torchrun, marks=pytest.mark.long)])
def test_ranks_of_a_replica_save_resume_and_recover_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, launch: Callable[..., None]
) -> None:
    """One process then goes on without what each rank had for itself."""
    launch(manager_checkpoint_ranks.__file__, 2, str(tmp_path), timeout_s=110)

    manager = StateManager(checkpoint_store=CheckpointStore(tmp_path / "a", read_only=True))
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 5))
    loader = {"drawn": 3}
    manager.register("model", model)
    manager.register("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))
    manager.register_state_dict_fn("loader", loader.update, lambda: dict(loader), scope="local")
    recovery = manager.resume()
    manager.shutdown()
    assert recovery is not None
    assert (recovery.step, loader) == (8, {"drawn": 3})
    assert "the local states ['loader'] are unchanged" in caplog.text
    assert "has no local states for the number of ranks" in caplog.text


def test_refused_snapshots_leave_no_copies_behind_without_the_garbage_collector() -> None:
    model = torch.nn.BatchNorm1d(4)  # Its buffers are copied at each boundary.
    transport = HTTPTransport[Any](settings=TransportSettings(host="127.0.0.1", limits=Limits(max_snapshots=1)))
    manager = StateManager(checkpoint_transport=transport)
    manager.register("model", model)
    manager.snapshot(0).result(10)
    lease = transport.server.lease(0)
    snapshots = manager._replica.snapshots
    assert snapshots is not None
    gc.collect()
    gc.disable()
    try:
        for step in range(1, 6):
            snapshots.request(share=True)
            manager.start_step(step)
        assert not [each for each in gc.get_objects() if isinstance(each, HeldState)]
    finally:
        gc.enable()
        lease.release()
        manager.shutdown()
