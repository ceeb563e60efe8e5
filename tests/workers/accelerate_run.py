"""A loop with the real Accelerate, with a manager or without, that may crash at a step (`test_accelerate.py`).

Usage: ``accelerate_run.py ROOT [--keep-every 1] …``, with ``KILL_AFTER_S`` in the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from killed_programs import Notes, kill_later
from torch import nn
from torch.utils.data import DataLoader

from ft_transport import CheckpointStore, HTTPTransport, state_digest
from manager import Manager, StateManager
from manager.integrations.accelerate import FaultTolerantLoop

NUM_SAMPLES, NUM_EPOCHS = 26, 3


class CrashError(Exception):
    pass


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with noise from the global generator, as of an augmentation."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) / NUM_SAMPLES + 0.1 * torch.randn(8)


class Average:
    """An object of ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.weights = torch.zeros(8)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])


def train(
    root: Path,
    crash_at: int = -1,
    *,
    accumulate: int = 1,
    batch_size: int = 4,
    plain: bool = False,
    by_hand: bool = False,
    num_epochs: int = NUM_EPOCHS,
    keep_every: int | None = None,
    save_every: int | None = 2,
    notes: Notes | None = None,
) -> dict[str, Any]:
    """Train, and return a digest of the state and the losses. ``plain``: without a manager."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Samples(), batch_size=batch_size, shuffle=True, generator=generator)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    average = Average()
    accelerator.register_for_checkpointing(average)
    losses: dict[int, float] = {}
    manager: StateManager | None = None
    step, has_stepped = 0, False
    try:
        if not plain:
            manager = Manager(
                checkpoint_transport=HTTPTransport() if keep_every else None,
                keep_every=keep_every,
                checkpoint_store=CheckpointStore(root, keep=2) if save_every else None,
                save_every=save_every,
            )
            loop = FaultTolerantLoop(accelerator, manager)
            step = loop.step
        for epoch in range(num_epochs) if manager is None else loop.epochs(num_epochs):
            if manager is None:
                loader.set_epoch(epoch)
            for number, batch in enumerate(loader if manager is None else loop.batches(loader)):
                with contextlib.nullcontext() if by_hand else accelerator.accumulate(model):
                    loss = (model(batch) - batch).square().mean()
                    accelerator.backward(loss)
                    if notes is not None:
                        kill_later()
                        at = f"epoch {epoch}, batch {number if manager is None else loop.batch}"
                        notes.add(f"{at}: samples", f"{state_digest({'': batch}):016x}")
                        notes.add(f"{at}: loss", loss.item())
                    if not by_hand or (number if manager is None else loop.batch) % 3 == 2:
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                        has_stepped = accelerator.sync_gradients
                if has_stepped:
                    has_stepped = False
                    step += 1
                    losses[step] = loss.item()
                    average.weights.lerp_(accelerator.unwrap_model(model)[0].bias.detach(), 0.1)
                    if step == crash_at:
                        raise CrashError
    finally:
        if manager is not None:
            manager.shutdown()
    state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), average.state_dict()]
    return {"digest": state_digest({str(at): each for at, each in enumerate(state)}), "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--keep-every", type=int)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained = train(
        options.root / "steps",
        accumulate=3,
        plain=options.plain,
        num_epochs=options.epochs,
        keep_every=options.keep_every,
        save_every=options.save_every,
        notes=Notes(options.root / "notes"),
    )
    print(f"{trained['digest']:016x}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
