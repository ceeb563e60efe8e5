"""A training run that can be killed and resumed; prints its order of data and, in the end, a digest of its state.

Usage: ``checkpoint_resume.py ROOT NUM_STEPS KILLED_IN SAVE_EVERY``. It is killed by SIGKILL in the
middle of step KILLED_IN, and never if that is negative. It goes on from the newest checkpoint, if there is one.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from programs import fork_writers
from state_equality import exact
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from ft_transport import CheckpointStore

NUM_SAMPLES = 37  # The last batch of an epoch is smaller.


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.arange(8.0) + index


class Loader:
    """torchdata's, which is begun anew after each epoch."""

    def __init__(self) -> None:
        self._loader = StatefulDataLoader(Samples(), batch_size=4, shuffle=True, num_workers=0)
        self._batches = iter(self._loader)

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._batches = iter(self._loader)


class Run:
    def __init__(self, loader: Any) -> None:
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=100)
        self.loader = loader
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "random": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.loader.load_state_dict(state["loader"])
        self.step = state["step"]
        # Last: what loads may draw numbers.
        torch.set_rng_state(state["random"]["torch"])
        random.setstate(state["random"]["python"])
        np.random.set_state(state["random"]["numpy"])

    def train(self, kill: bool) -> list[int]:
        indices, batch = next(self.loader)
        noise = random.random() + float(np.random.rand())
        self.optimizer.zero_grad()
        (self.model(batch * noise) - batch).square().mean().backward()
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return indices.tolist()


def main() -> None:
    root, num_steps, killed_in, save_every = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    fork_writers()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    run = Run(Loader())
    with CheckpointStore(root, rank_local=("loader", "random")) as store:
        if store.latest() is not None:
            run.load(store.load(into=run.state()).state)
        while run.step < num_steps:
            step = run.step
            print(step, run.train(step == killed_in), flush=True)
            if run.step % save_every == 0:
                # Training goes on while it is written; the kill comes when it is there.
                handle = store.save(run.step, run.state())
                if run.step + 1 == killed_in:
                    handle.result()
    print("state", hashlib.sha256(repr(exact(run.state())).encode()).hexdigest())


if __name__ == "__main__":
    main()
