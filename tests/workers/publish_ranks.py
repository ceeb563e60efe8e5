"""What four ranks do when they publish; started by `ranks`.

Usage: ``publish_ranks.py DIRECTORY SCENARIO...``, as `ranks.report_scenarios` says; ``DIRECTORY/SCENARIO.json`` has the
URLs of the engines.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import report_scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ft_transport import LoRAAdapter, Publisher, TransportError, VLLMEngine
from ft_transport.publish.trl import PublisherWeightTransfer

COLLECTIVE_TIMEOUT_S = 2.0
"""Of the trainer's process group."""
ENGINE_TIMEOUT_S = 20.0
HANGING_TIMEOUT_S = 2.0
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q"]}
NAMES = ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight")


class Ranks:
    """What a scenario needs of its rank."""

    def __init__(self, directory: Path, scenario: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.root = directory / scenario
        self.urls: list[str] = json.loads((directory / f"{scenario}.json").read_text())
        # Making a group has the same timeout, and the scenario before may have held some ranks for longer.
        dist.barrier()
        # Of each scenario its own: gloo closes a group in which an operation timed out.
        self.trainer = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def publisher(self, engine_timeout_s: float = ENGINE_TIMEOUT_S, **options: Any) -> Publisher:
        engines = [VLLMEngine(url) for url in self.urls]
        return Publisher(engines, self.root, engine_timeout=timedelta(seconds=engine_timeout_s), **options)

    def collective(self) -> None:
        """What comes next in a trainer: anything over its process group."""
        dist.barrier(group=self.trainer)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {NAMES[0]: torch.full((4, 8), value), NAMES[1]: torch.full((8, 4), value)}


def adapter(value: float) -> LoRAAdapter:
    """The first tensor is divided among the ranks, the second is whole on all of them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = tensors(value)
    sharded = distribute_tensor(whole[NAMES[0]], mesh, [Shard(0)])
    replicated = distribute_tensor(whole[NAMES[1]], mesh, [Replicate()])
    return LoRAAdapter({NAMES[0]: sharded, NAMES[1]: replicated}, CONFIG)


def told(action: Callable[[], Any]) -> dict[str, Any]:
    """What an action raised, and when."""
    try:
        action()
    except (TransportError, RuntimeError) as error:
        report = getattr(error, "report", None)
        return {
            "type": type(error).__name__,
            "text": str(error),
            "at_s": time.time(),
            "outcomes": [each.outcome for each in report.engines] if report is not None else None,
        }
    return {"type": None, "text": "", "at_s": time.time(), "outcomes": None}


def published(ranks: Ranks, engine_timeout_s: float = ENGINE_TIMEOUT_S) -> dict[str, Any]:
    with ranks.publisher(engine_timeout_s) as publisher:
        weights = adapter(1.0)
        dist.barrier()
        handle = publisher.publish(1, weights)
        released_s = time.time()
        written_s = os.stat(handle.directory).st_ctime
        for _ in range(3):
            ranks.collective()
        outcome = told(handle.result)
        after = told(ranks.collective)
        report = handle.report()
        return {
            "released_s": released_s,
            "written_s": written_s,
            "outcome": outcome,
            "after": after,
            "engines": [(each.outcome, each.seconds) for each in report.engines],
        }


def all_good(ranks: Ranks) -> dict[str, Any]:
    return published(ranks)


def one_refuses(ranks: Ranks) -> dict[str, Any]:
    return published(ranks)


def one_hangs(ranks: Ranks) -> dict[str, Any]:
    return published(ranks, HANGING_TIMEOUT_S)


def rank_0_dies(ranks: Ranks) -> dict[str, Any]:
    publisher = ranks.publisher()
    handle = publisher.publish(1, adapter(1.0))
    dist.barrier()
    died_s = time.time()
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"died_s": died_s, "outcome": told(handle.result)}


def one_fails_to_export(ranks: Ranks) -> dict[str, Any]:
    with ranks.publisher() as publisher:
        weights = adapter(1.0)

        def fail() -> LoRAAdapter:
            if ranks.rank == 2:
                raise PermissionError(13, "Permission denied")
            return weights

        dist.barrier()
        started_s = time.time()
        outcome = told(lambda: publisher.publish(1, fail))
        dist.barrier()
        left = sorted(path.name for path in ranks.root.glob("version*"))
        dist.barrier()
        again = told(lambda: publisher.publish(1, weights).result())
        return {"outcome": outcome, "started_s": started_s, "left": left, "again": again}


def whole_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        # Five rows for four ranks: one of them has none of some.
        "rows": torch.randn(5, 3, generator=generator),
        "columns": torch.randn(3, 8, generator=generator),
        "replicated": torch.randn(7, generator=generator).bfloat16(),
        "plain": torch.arange(6).view(2, 3),
        "empty": torch.empty(0, 4),
    }


def sharded_weights(ranks: Ranks) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = whole_weights()
    with ranks.publisher() as publisher:
        weights = {
            **whole,
            "rows": distribute_tensor(whole["rows"], mesh, [Replicate(), Shard(0)]),
            "columns": distribute_tensor(whole["columns"], mesh, [Shard(1), Shard(1)]),
            "replicated": distribute_tensor(whole["replicated"], mesh, [Replicate(), Replicate()]),
        }
        good = told(lambda: publisher.publish(3, weights).result())
        stale = told(lambda: publisher.publish(2, weights))
        diverged = told(lambda: publisher.publish(4, {**weights, "plain": torch.full((3,), float(ranks.rank == 1))}))
        incomplete = told(lambda: publisher.publish(4, {name: weights[name] for name in ("plain", "columns")}))
        differing = told(lambda: publisher.publish(4 + ranks.rank, weights))
        return {
            "good": good,
            "stale": stale,
            "diverged": diverged,
            "incomplete": incomplete,
            "differing": differing,
            "latest": publisher.latest(),
            "names": sorted(path.name for path in ranks.root.glob("version-*")),
        }


def synchronizes_from_trl(ranks: Ranks) -> dict[str, Any]:
    """Makes the calls of TRL's trainer (``_sync_weight_merged`` in async_grpo_trainer.py, 1.16.0)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = whole_weights()
    weights = {**whole, "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)])}
    engines = [VLLMEngine(url) for url in ranks.urls]
    transfer = PublisherWeightTransfer(lambda group: Publisher(engines, ranks.root, group))

    def iterated() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    versions = []
    for number in range(2):
        # A trainer that trains again does not make this call again.
        if ranks.rank == 0 and number == 0:
            transfer.init_weight_transfer()
        for _ in range(2):
            if ranks.rank == 0:
                transfer.pause()
            ranks.collective()
            if ranks.rank == 0:
                transfer.send_weights(iterated())
                transfer.resume()
            else:
                list(iterated())
            ranks.collective()
            versions.append(transfer.publisher.latest() if transfer.publisher is not None else None)
        transfer.destroy()
    return {"versions": versions}


SCENARIOS = (
    all_good,
    one_refuses,
    one_hangs,
    rank_0_dies,
    one_fails_to_export,
    sharded_weights,
    synchronizes_from_trl,
)

if __name__ == "__main__":
    report_scenarios(SCENARIOS, Ranks)
