"""A replica that trains on `ElasticBatches`: ``same_batches_replica.py DIRECTORY NAME NUM_STEPS``.

It appends lines of JSON to a file of its own: ``drawn``, before a step is committed, with the replica's place, its
samples and the sum of their losses; ``committed``; and ``done`` with the weights.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ft_transport import HTTPTransport, TransportSettings
from manager import ElasticBatches, ElasticSampler, Manager, ManagerConfig

NUM_SAMPLES, BATCH_SIZE, NUM_MICROBATCHES, WIDTH = 5000, 4, 12, 32


class Curve(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A function with noise, which no model of this size fits exactly."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        mixed = self._inputs @ torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self._targets = mixed.tanh() + 0.1 * torch.randn(NUM_SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._inputs[index], self._targets[index], index


def main() -> None:
    directory, name, num_steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = ManagerConfig(
        min_replica_size=1,
        replica_id=name,
        timeout=timedelta(seconds=5),
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=timedelta(seconds=3),
        heartbeat_timeout=timedelta(seconds=1),
    )
    transport = HTTPTransport(config.timeout, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    manager = Manager(config=config, checkpoint_transport=transport)
    sampler = ElasticSampler(NUM_SAMPLES, batch_size=BATCH_SIZE, num_microbatches=NUM_MICROBATCHES, seed=2)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.register("sampler", sampler)
    manager.attach(optimizer)
    batches = ElasticBatches(manager, DataLoader(Curve(), batch_sampler=sampler, num_workers=1))

    with (directory / f"{name}-{os.getpid()}.txt").open("w", buffering=1) as notes:
        while manager.current_step() < num_steps:
            manager.start_quorum()
            optimizer.zero_grad()
            step, place, num_replicas = (
                manager.current_step(), manager.participating_rank(), manager.num_participants(),
            )  # fmt: skip
            samples: list[int] = []
            loss_sum = 0.0
            for inputs, targets, indices in batches:
                loss = (model(inputs) - targets).square().mean()
                (loss / len(batches)).backward()
                samples += indices.tolist()
                loss_sum += loss.item()
            drawn = {"drawn": step, "place": place, "num_replicas": num_replicas, "samples": samples, "loss": loss_sum}
            notes.write(json.dumps(drawn) + "\n")
            manager.average_gradients(model)
            if manager.should_commit():
                optimizer.step()
                notes.write(json.dumps({"committed": step, "num_replicas": num_replicas}) + "\n")
        weights = [value for each in model.parameters() for value in each.detach().flatten().tolist()]
        notes.write(json.dumps({"done": sampler.num_dropped, "weights": weights}) + "\n")
    manager.shutdown()


if __name__ == "__main__":
    main()
