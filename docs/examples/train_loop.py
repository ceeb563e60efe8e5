"""Train with what real loops have: replicas heal, and a run that was killed goes on bit for bit.

Alone, with a checkpoint of every step::

    RUST_LOG=error python train_loop.py --checkpoints checkpoints

With replicas that heal each other, start a Lighthouse, then each replica::

    RUST_LOG=error torchft_lighthouse --min_replicas 1 --join_timeout_ms 80000 --heartbeat_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python train_loop.py --replica 0 --replicas 2
    python train_loop.py --replica 1 --replicas 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Sampler

from ft_transport import CheckpointStore, state_digest
from manager import Manager, RandomState

NUM_ITEMS = 480
BATCH = 8
ACCUMULATION = 2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--checkpoints")
parser.add_argument("--replica", type=int, default=0)
parser.add_argument("--replicas", type=int, default=1)
parser.add_argument("--workers", type=int, default=2)
options = parser.parse_args()


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items with noise that depends on the item alone: worker processes have no random state to save."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return features, (features[0] > features[1]).long()


class StepOrder(Sampler[list[int]]):
    """The items of each batch, as a function of step and replica; ``start`` is the next step."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        step, at_once = self.start, BATCH * ACCUMULATION * options.replicas
        while True:
            epoch, place = divmod(step, NUM_ITEMS // at_once)
            order = torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(epoch)).tolist()
            own = order[place * at_once : (place + 1) * at_once][options.replica :: options.replicas]
            for first in range(0, len(own), BATCH):
                yield own[first : first + BATCH]
            step += 1


class Batches:
    """The batches of a step, read ahead by worker processes."""

    def __init__(self) -> None:
        self._order = StepOrder()
        # A generator of its own: otherwise each new iterator draws a seed from the generator of the dropout.
        self._loader = DataLoader(
            Items(), batch_sampler=self._order, num_workers=options.workers, generator=torch.Generator()
        )
        self._next_step = -1

    def of(self, step: int) -> list[list[torch.Tensor]]:
        """Return the micro-batches of a step."""
        if step != self._next_step:  # the beginning, a heal, or a step that is repeated
            self._order.start = step
            self._iterator = iter(self._loader)
        self._next_step = step + 1
        return [next(self._iterator) for _ in range(ACCUMULATION)]


def main() -> None:
    """Train until the step that was asked for is committed."""
    torch.manual_seed(options.replica)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.steps + 1)
    scaler = torch.amp.GradScaler("cpu")

    manager = Manager(
        min_replica_size=1,
        replica_id=f"loop_{options.replica}",
        timeout=timedelta(seconds=15),
        checkpoint_store=CheckpointStore(options.checkpoints) if options.checkpoints else None,
        save_every=1 if options.checkpoints else None,
    )
    manager.register("model", model)
    manager.register("ema", ema, is_stable=True)  # changes inside manager.writing() alone
    manager.register("optimizer", optimizer)
    manager.register("scheduler", scheduler)
    manager.register("scaler", scaler)
    manager.register("random", RandomState(), scope="local")  # each replica draws dropout masks of its own
    manager.attach(optimizer)
    if options.checkpoints:
        manager.resume()

    batches = Batches()
    while manager.current_step() < options.steps:
        manager.start_quorum()  # a heal ends here: the step below is that of the healed state
        optimizer.zero_grad()
        for features, labels in batches.of(manager.current_step()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(features), labels) / ACCUMULATION
            scaler.scale(loss).backward()
        manager.average_gradients(model)  # still scaled
        if manager.should_commit():
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            with manager.writing("averaging the weights"):
                ema.update_parameters(model)
        parameters = {"model": dict(model.named_parameters()), "ema": dict(ema.named_parameters())}
        digest = f"{state_digest(parameters):016x}"
        print(f"step {manager.current_step()} replicas {manager.num_participants()} weights {digest}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
