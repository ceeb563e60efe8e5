"""The real Lightning with a manager: after a crash, it trains what the undisturbed run does."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ft_transport import CheckpointStore, ConfigurationError, state_digest
from manager import Manager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that Lightning imports
    lightning = pytest.importorskip("lightning.pytorch")

from manager.integrations.lightning import FaultTolerance

NUM_SAMPLES, NUM_EPOCHS = 26, 3

pytestmark = pytest.mark.filterwarnings("ignore")


class CrashError(Exception):
    pass


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with noise from the global generator, as of an augmentation."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) / NUM_SAMPLES + 0.1 * torch.randn(8)


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
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
    module = Module(crash_at)
    settings: dict[str, Any] = {
        "max_epochs": NUM_EPOCHS, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, **more,
    }  # fmt: skip
    loaders = [DataLoader(Samples(), batch_size=4, shuffle=True), DataLoader(Samples(), batch_size=8)]
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


@pytest.mark.parametrize("accumulate", [1, 3])  # an epoch has 7 batches
def test_a_crashed_run_ends_as_one_that_nobody_disturbed(tmp_path: Path, accumulate: int) -> None:
    more = {"accumulate_grad_batches": accumulate}
    undisturbed = train(tmp_path, plain=True, **more)
    per_epoch = -(-7 // accumulate)
    # In the middle of each epoch, twice in one epoch, and at the end of one.
    for step in (2, per_epoch, per_epoch + 1, per_epoch + 2, 3 * per_epoch - 1):
        with pytest.raises(CrashError):
            train(tmp_path, step, **more)
    last = train(tmp_path, **more)
    assert (last["digest"], last["step"]) == (undisturbed["digest"], undisturbed["step"])
    assert last["losses"].items() <= undisturbed["losses"].items()
    assert len(last["losses"]) <= accumulate


def test_every_step_is_a_step_from_which_a_run_resumes(tmp_path: Path) -> None:
    undisturbed = train(tmp_path, plain=True)
    for step in range(1, undisturbed["step"]):
        with pytest.raises(CrashError):
            train(tmp_path, step)
    assert train(tmp_path)["digest"] == undisturbed["digest"]


def test_a_trainer_without_the_plugin_is_refused(tmp_path: Path) -> None:
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    try:
        trainer = lightning.Trainer(callbacks=[FaultTolerance(manager)], accelerator="cpu", logger=False)
        with pytest.raises(ConfigurationError, match="and the plugin checkpoint_io"):
            trainer.fit(Module(-1), DataLoader(Samples(), batch_size=4))
    finally:
        manager.shutdown()
