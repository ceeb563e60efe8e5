"""Two replicas of the real Ray Train, whose workers are killed, or not (`tests/integrations/test_ray.py`).

Usage: ``ray_run.py DIRECTORY --kills 20 --seed 1``, and ``ray_run.py OTHER --steps N`` for as many steps without a
kill. With ``--notices 5``, preemptions are announced, to one replica or to both. Each step has four microbatches, which
the replicas of its quorum divide. Their gradients are multiples of a power of two, small enough for exact sums: so a
step's average is the same bit for bit, whoever trained which microbatch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from killed_programs import Notes
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch import nn
from torch.utils.data import DataLoader

from ft_transport import CheckpointStore, state_digest
from manager import ElasticBatches, ElasticSampler, Manager

NUM_SAMPLES, BATCH_SIZE, NUM_MICROBATCHES, WIDTH = 500, 2, 4, 16
GRID = 2.0**-16
LIGHTHOUSE = {"min_replicas": 1, "join_timeout_ms": 80000, "heartbeat_timeout_ms": 1000}


def train(config: dict[str, Any]) -> None:
    directory, rank = Path(config["directory"]), ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: (gradient / GRID).round() * GRID)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [(each, index) for index, each in enumerate(torch.randn(NUM_SAMPLES, WIDTH))]
    manager = Manager(
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        checkpoint_store=CheckpointStore(directory / "steps" / str(rank), keep=2),
    )
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    sampler = ElasticSampler(NUM_SAMPLES, batch_size=BATCH_SIZE, num_microbatches=NUM_MICROBATCHES, seed=2)
    manager.register("sampler", sampler)
    manager.attach(optimizer)
    notice = directory / "notice"
    manager.on_preemption(
        signals=(),  # Ray calls this function on a thread, where Python sets no signal handlers
        is_announced=lambda: notice.exists() and str(os.getpid()) in notice.read_text().split(),
    )
    manager.resume()
    batches = ElasticBatches(manager, DataLoader(data, batch_sampler=sampler))  # type: ignore[arg-type]

    notes, alive = Notes(directory / "notes"), directory / "alive" / f"{rank}.json"
    last = directory / "last"
    while not last.exists() or manager.current_step() < int(last.read_text()):
        manager.start_quorum()
        optimizer.zero_grad()
        step = manager.current_step()
        for inputs, indices in batches:
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            notes.add(f"step {step}: loss of samples {indices.tolist()}", loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None and len(batches):
                parameter.grad /= len(batches)
        manager.average_gradients(model)
        if manager.should_commit():
            optimizer.step()
            notes.add(f"step {step}: weights", f"{state_digest(model.state_dict()):016x}")
            place = {"pid": os.getpid(), "step": step, "num_replicas": manager.num_participants()}
            written = alive.with_suffix(".new")
            written.write_text(json.dumps(place))
            written.replace(alive)
        if manager.num_participants() == 1:
            time.sleep(config["alone_s"])  # fewer steps until Ray has replaced the other worker
    manager.shutdown()


class Disturber(threading.Thread):
    """Ends workers at random moments, whenever both have trained a step together; then says which step is the last."""

    def __init__(self, directory: Path, kills: int, notices: int, seed: int) -> None:
        super().__init__()
        self.ended = threading.Event()
        self._directory, self._chosen = directory, random.Random(seed)
        self._ended_pids: set[int] = set()
        self._acts: list[Callable[[list[dict[str, int]]], None]] = [*[self._kill] * kills, *[self._announce] * notices]

    def run(self) -> None:
        for act in self._acts:
            self._await_places()
            time.sleep(self._chosen.uniform(0, 0.5))
            if not (places := self._await_places()):
                return
            act(places)
        if places := self._await_places():
            (self._directory / "last").write_text(str(max(place["step"] for place in places) + 20))

    def _await_places(self) -> list[dict[str, int]]:
        """Return where both replicas are, once they have trained a step together in processes that nobody has ended."""
        while not self.ended.is_set():
            with contextlib.suppress(FileNotFoundError):
                places = [json.loads((self._directory / "alive" / f"{rank}.json").read_text()) for rank in range(2)]
                if all(place["num_replicas"] == 2 and place["pid"] not in self._ended_pids for place in places):
                    return places
            time.sleep(0.01)
        return []

    def _kill(self, places: list[dict[str, int]]) -> None:
        victim = self._chosen.choice(places)
        self._ended_pids.add(victim["pid"])
        print(f"kill of process {victim['pid']} at step {victim['step']}", flush=True)
        os.kill(victim["pid"], signal.SIGKILL)

    def _announce(self, places: list[dict[str, int]]) -> None:
        preempted = self._chosen.choice([places[:1], places[1:], places])
        self._ended_pids |= {place["pid"] for place in preempted}
        print(f"notice to {len(preempted)} at step {preempted[0]['step']}", flush=True)
        written = self._directory / "notice.new"
        written.write_text(" ".join(str(place["pid"]) for place in preempted))
        written.replace(self._directory / "notice")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--notices", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory: Path = options.directory
    (directory / "alive").mkdir(parents=True)
    if options.steps is not None:
        (directory / "last").write_text(str(options.steps))
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    disturber = Disturber(directory, options.kills, options.notices, options.seed)
    try:
        if options.steps is None:
            disturber.start()
        began_s = time.monotonic()
        TorchTrainer(
            train,
            train_loop_config={"directory": str(directory), "alone_s": 0.2 if options.steps is None else 0.0},
            torch_config=TorchftConfig(lighthouse_kwargs=LIGHTHOUSE),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(directory), failure_config=FailureConfig(max_failures=-1)),
        ).fit()
        print(f"{time.monotonic() - began_s:.1f} s, last step {(directory / 'last').read_text()}", flush=True)
    finally:
        disturber.ended.set()
        if options.steps is None:
            disturber.join()
        ray.shutdown()


if __name__ == "__main__":
    main()
