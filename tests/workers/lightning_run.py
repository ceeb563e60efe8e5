"""The real Lightning, with a manager or without, that may crash at a step (`test_lightning.py`).

Usage: ``lightning_run.py ROOT [--keep-every 1] …``, with ``KILL_AFTER_S`` in the environment.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from accelerate_run import NUM_EPOCHS, CrashError, Samples
from killed_programs import Notes, kill_later
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

from ft_transport import CheckpointStore, HTTPTransport, state_digest
from manager.integrations.lightning import FaultTolerance


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, crash_at: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
        self.losses: dict[str, float] = {}
        self.crash_at = crash_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash_at:
            raise CrashError
        loss = (self.net(batch) - batch).square().mean()
        self.losses[f"epoch {self.current_epoch}, batch {batch_idx}"] = loss.item()
        return loss

    def validation_step(self, batch: torch.Tensor, _batch_idx: int) -> None:
        self.log("validation", (self.net(batch) - batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counting(lightning.Callback):  # type: ignore[misc]
    """A callback whose state changes in each hook after the step, and is logged."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.count += 1
        module.log("count", float(self.count))

    def on_train_epoch_end(self, *_: Any) -> None:
        self.count += 1

    def on_validation_end(self, *_: Any) -> None:
        self.count += 1


def train(root: Path, crash_at: int = -1, *, plain: bool = False, **more: Any) -> dict[str, Any]:
    """Train, and return a digest of the weights and the losses. ``plain``: without a manager."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(3)
    module = Module(crash_at)
    settings: dict[str, Any] = {
        "max_epochs": NUM_EPOCHS, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, **more,
    }  # fmt: skip
    callbacks = settings.pop("callbacks", [])
    loaders = [
        DataLoader(Samples(), batch_size=4, shuffle=True, generator=generator),
        DataLoader(Samples(), batch_size=8),
    ]
    if plain:
        trainer = lightning.Trainer(callbacks=callbacks, **settings)
        trainer.fit(module, *loaders)
    else:
        fault_tolerance = FaultTolerance(checkpoint_store=CheckpointStore(root, keep=2), save_every=1)
        try:
            trainer = lightning.Trainer(
                callbacks=[fault_tolerance, *callbacks], plugins=[fault_tolerance.checkpoint_io], **settings
            )
            trainer.fit(module, *loaders, ckpt_path=fault_tolerance.resume())
        finally:
            fault_tolerance.manager.shutdown()
    return {"digest": state_digest(module.state_dict()), "losses": module.losses, "step": trainer.global_step}


class Noted(Module):
    """Notes the samples of each step, with their noise."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(-1)
        self._notes = notes

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        kill_later()
        self._notes.add(f"epoch {self.current_epoch}, batch {batch_idx}: samples", f"{state_digest({'': batch}):016x}")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class NotingLogger(Logger):  # type: ignore[misc]
    """Notes what Lightning logs."""

    name, version = "notes", 0

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._notes.add(f"step {step}: {name}", value)

    def log_hyperparams(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--keep-every", type=int)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    notes = Notes(options.root / "notes")
    module = Noted(notes)
    generator = torch.Generator().manual_seed(3)
    loaders = [
        DataLoader(Samples(), batch_size=4, shuffle=True, generator=generator),
        DataLoader(Samples(), batch_size=8),
    ]
    settings: dict[str, Any] = {
        "max_epochs": options.epochs, "accelerator": "cpu", "logger": NotingLogger(notes), "log_every_n_steps": 1,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    if options.plain:
        lightning.Trainer(**settings).fit(module, *loaders)
    else:
        fault_tolerance = FaultTolerance(
            checkpoint_transport=HTTPTransport() if options.keep_every else None,
            keep_every=options.keep_every,
            checkpoint_store=CheckpointStore(options.root / "steps", keep=2) if options.save_every else None,
            save_every=options.save_every,
        )
        trainer = lightning.Trainer(callbacks=[fault_tolerance], plugins=[fault_tolerance.checkpoint_io], **settings)
        trainer.fit(module, *loaders, ckpt_path=fault_tolerance.resume())
    print(f"{state_digest(module.state_dict()):016x}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
