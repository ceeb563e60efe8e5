"""Train torchtitan's debug model with torchtitan's trainer: alone, or in replicas that may die.

The lines that matter are those with ``FaultTolerant``. All else makes the job small enough for a machine without a GPU:
random tokens, and the answers of a device that torchtitan asks for. Run with torchtitan 0.3.0 and torch 2.13.0::

    pip install torchtitan==0.3.0 triton  # triton is imported, and not used without a GPU
    torchrun --nproc-per-node 2 train_torchtitan.py  # resumes when it is started again

    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    torchrun --standalone --nproc-per-node 2 train_torchtitan.py --replica 0 --replicas 2
    torchrun --standalone --nproc-per-node 2 train_torchtitan.py --replica 1 --replicas 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

if not torch.accelerator.is_available():
    # What torchtitan asks of a device that it has no place for: the CPU.
    of_the_cpu: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 34),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name in ("set_device", "device_count", "synchronize"):
        of_the_cpu[name] = getattr(torch.cpu, name)
    titan_utils.device_type, titan_utils.device_module = "cpu", SimpleNamespace(**of_the_cpu)

import torchtitan.distributed.utils as titan_distributed

if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 is ahead of torch 2.13 here
    titan_distributed.set_pg_timeouts = lambda **_: None

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from manager.integrations.torchtitan import FaultTolerantCheckpointer
from manager.integrations.torchtitan_replicas import FaultTolerantTrainer


class RandomTokens(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """An endless stream of random tokens, different on every rank, that knows its place."""

    def __init__(self, seed: int, seq_len: int) -> None:
        self._seed, self._seq_len = seed, seq_len
        self._place = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield samples from the present place on."""
        while True:
            generator = torch.Generator().manual_seed(1000 * self._seed + self._place)
            tokens = torch.randint(0, 2048, (self._seq_len + 1,), generator=generator)
            self._place += 1
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self._place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at a place."""
        self._place = state_dict["place"]


class RandomTokenLoader(ParallelAwareDataloader):
    """torchtitan's data loader, with random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """The settings of torchtitan's data loader."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        del config  # torchtitan passes it by this name
        super().__init__(RandomTokens(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)


class Numbers(BaseTokenizer):
    """The tokenizer of a text that consists of token numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **_: Any) -> None:
        del config
        super().__init__()

    def encode(self, text: str) -> list[int]:
        """Return the numbers in a text."""
        return [int(each) for each in text.split()]

    def decode(self, numbers: list[int]) -> str:
        """Return numbers as a text."""
        return " ".join(map(str, numbers))

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 2048


def configuration(options: argparse.Namespace) -> Trainer.Config:
    """Return torchtitan's configuration of its debug model, small enough for a CPU."""
    theirs = llama3_torchft_debugmodel()
    trainer = FaultTolerantTrainer if options.replicas > 1 else Trainer
    config = trainer.Config(**{each.name: getattr(theirs, each.name) for each in fields(trainer.Config)})
    config.checkpoint = FaultTolerantCheckpointer.Config(
        enable=True, interval=options.save_every, keep_interval=options.keep_every, keep_latest_k=2
    )
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs without a compiler
    config.dump_folder, config.debug.seed = options.folder, 5
    config.tokenizer, config.dataloader = Numbers.Config(), RandomTokenLoader.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, options.steps
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the one that torchtitan's trainer for replicas supports
    config.profiler.enable_profiling = False
    config.validator.enable = False
    if options.replicas == 1:
        config.optimizer = default_adamw(lr=8e-4)
        return config
    replicas = config.fault_tolerance
    replicas.process_group, replicas.sync_steps, replicas.num_fragments = "gloo", options.sync_every, 1
    replicas.semi_sync_method = "diloco" if options.sync_every else None
    replicas.replica_id, replicas.group_size = options.replica, options.replicas
    replicas.min_replica_size = options.min_replicas
    return config


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="(inner) steps")
    parser.add_argument("--folder", default="out-torchtitan")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--keep-every", type=int, default=0)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--sync-every", type=int, default=0, help="train with DiLoCo, and sync every so many steps")
    return parser


def reduce_on_cpus(model: torch.nn.Module) -> None:
    """Make FSDP sum gradients and divide later: gloo has no reduction that does both."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def main() -> None:
    """Train the debug model."""
    trainer = configuration(parser().parse_args()).build()
    reduce_on_cpus(trainer.model_parts[0])
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
