"""A run of transformers' Trainer that may be killed at a step: it prints what it has trained.

Usage: ``transformers_run.py ROOT [--keep-every 1] …``, with ``KILL_AT`` (a step) or ``KILL_AFTER_S`` (seconds after the
first step of this process) in the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from killed_programs import kill, kill_later
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

from ft_transport import CheckpointStore, HTTPTransport, state_digest
from manager import Manager
from manager.integrations.transformers import FaultTolerantTrainer

NUM_SAMPLES, LENGTH, VOCABULARY = 50, 8, 32


def row_of(index: int) -> torch.Tensor:
    if index >= NUM_SAMPLES:
        raise IndexError  # ends an iteration over the dataset
    return torch.randint(2, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of token numbers, each with noise from the global generator, as of an augmentation."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = row_of(index)
        row[torch.randint(LENGTH, ())] = 1
        return {"input_ids": row}


class Seeded(Sentences):
    """Rows without noise, for worker processes."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": row_of(index)}


def mask(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Mask tokens by the global generator, as ``DataCollatorForLanguageModeling`` does."""
    labels = torch.stack([row["input_ids"] for row in rows])
    masked = torch.rand(labels.shape) < 0.3
    return {"input_ids": labels.masked_fill(masked, 0), "labels": labels.masked_fill(~masked, -100)}


def hide_first(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    labels = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": labels.index_fill(1, torch.tensor(0), 0), "labels": labels}


class Ends(TrainerCallback):
    """Ends the run at a step."""

    def __init__(self, at: int, end: Callable[[], None]) -> None:
        self._at, self._end = at, end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            self._end()


class KillsLater(TrainerCallback):
    """Kills the process some time after its first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        kill_later()


def build(root: Path, manager: Manager | None, end_at: int = -1, end: Any = None, **more: Any) -> Trainer:
    """Return a trainer of 3 epochs, 13 steps of 4 samples each: with a manager, or transformers' own."""
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": 3, "logging_steps": 3, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 5, "learning_rate": 1e-2, "warmup_steps": 4,
        "max_grad_norm": 0.5,
    }  # fmt: skip
    args = TrainingArguments(str(root / "trainer"), **{**settings, **more})
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
    )
    data, collate = (Seeded(), hide_first) if args.dataloader_num_workers else (Sentences(), mask)
    others = {"eval_dataset": data, "callbacks": [Ends(end_at, end)]}
    if manager is None:
        return Trainer(BertForMaskedLM(config), args, collate, data, **others)
    return FaultTolerantTrainer(BertForMaskedLM(config), args, collate, data, manager=manager, **others)


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Train, and return a digest of the weights and the log of the losses."""
    metrics = trainer.train().metrics
    digest = f"{state_digest(trainer.accelerator.unwrap_model(trainer.model).state_dict()):016x}"
    whole = [metrics["train_loss"], trainer.state.total_flos]
    return {"digest": digest, "whole": whole, "log": [each for each in trainer.state.log_history if "loss" in each]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--keep-every", type=int)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    more: dict[str, Any] = {
        "gradient_accumulation_steps": options.accumulate,
        "num_train_epochs": options.epochs,
    }
    TrainingArguments(str(options.root), use_cpu=True, report_to=[], **more)  # starts torch.distributed
    manager = None
    if not options.plain:
        manager = Manager(
            checkpoint_transport=HTTPTransport() if options.keep_every else None,
            keep_every=options.keep_every,
            checkpoint_store=CheckpointStore(options.root / "steps", keep=2) if options.save_every else None,
            save_every=options.save_every,
        )
    kill_at = int(os.environ.get("KILL_AT", "-1"))
    trainer = build(options.root, manager, kill_at, kill, **more)
    trainer.add_callback(KillsLater)
    print(json.dumps(outcome(trainer)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
