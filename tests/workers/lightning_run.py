"""The real Lightning, with a manager or without, that may crash at a step (`test_lightning.py`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from accelerate_run import NUM_EPOCHS, CrashError, Samples
from torch import nn
from torch.utils.data import DataLoader

from ft_transport import CheckpointStore, state_digest
from manager import Manager
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
    loaders = [
        DataLoader(Samples(), batch_size=4, shuffle=True, generator=generator),
        DataLoader(Samples(), batch_size=8),
    ]
    if plain:
        trainer = lightning.Trainer(**settings)
        trainer.fit(module, *loaders)
    else:
        manager = Manager(checkpoint_store=CheckpointStore(root, keep=2), save_every=1)
        try:
            fault_tolerance = FaultTolerance(manager)
            trainer = lightning.Trainer(
                callbacks=[fault_tolerance], plugins=[fault_tolerance.checkpoint_io], **settings
            )
            trainer.fit(module, *loaders, ckpt_path=fault_tolerance.resume())
        finally:
            manager.shutdown()
    return {"digest": state_digest(module.state_dict()), "losses": module.losses, "step": trainer.global_step}
