"""Train torchtitan's debug model in fault-tolerant replicas: its own trainer, with this package's Manager.

torchtitan's experiment ``torchft`` makes a ``torchft.Manager`` and a ``DiLoCo``; ours take their places. All else makes
the job small enough for a machine without a GPU: random tokens, and the answers of a device that torchtitan asks for.
Run with torchtitan 0.3.0 and torch 2.13.0 on the CPU::

    pip install torchtitan==0.3.0 triton  # triton is imported, and not used without a GPU
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --standalone --nproc-per-node 1 train_torchtitan.py
    REPLICA=1 torchrun --standalone --nproc-per-node 1 train_torchtitan.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchft
from torchft import local_sgd

from ft_transport import state_digest
from manager import Manager, guard_diloco


class GuardedDiLoCo(local_sgd.DiLoCo):
    """torchft's DiLoCo, whose syncs exclude readers of the state."""

    def __init__(self, manager: Manager, *arguments: Any, **keywords: Any) -> None:
        super().__init__(manager, *arguments, **keywords)
        guard_diloco(manager, self)


torchft.Manager, local_sgd.DiLoCo = Manager, GuardedDiLoCo  # torchtitan makes these from here on

import torchtitan.tools.utils as titan_utils  # noqa: E402  (after the line above, as what follows)

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

import torchtitan.distributed.utils as titan_distributed  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 is ahead of torch 2.13 here
    titan_distributed.set_pg_timeouts = lambda **_: None

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402


class RandomTokens(BaseDataLoader):
    """Batches of random tokens, others on every replica."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to set."""

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        del config  # torchtitan passes it by this name
        self._generator = torch.Generator().manual_seed(dp_rank)
        self._shape = (local_batch_size, seq_len + 1)
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches without end."""
        while True:
            self.num_batches += 1
            print(f"batch {self.num_batches}", flush=True)
            tokens = torch.randint(0, 2048, self._shape, generator=self._generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return where the generator stands."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._generator.set_state(state_dict["generator"])


def main() -> None:
    """Train the debug model with DiLoCo over the replicas."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="inner steps")
    parser.add_argument("--sync-every", type=int, default=4, help="inner steps between two syncs of all replicas")
    parser.add_argument("--min-replicas", type=int, default=1)
    options = parser.parse_args()
    config = llama3_torchft_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs without a compiler
    config.dump_folder = tempfile.mkdtemp()
    config.tokenizer, config.dataloader = None, RandomTokens.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, options.steps
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.profiler.enable_profiling = False
    config.validator.enable = False
    config.checkpoint.enable = True  # it registers what healing carries
    config.checkpoint.interval = 10**9
    fault_tolerance = config.fault_tolerance
    fault_tolerance.process_group, fault_tolerance.sync_steps = "gloo", options.sync_every
    fault_tolerance.num_fragments, fault_tolerance.group_size = 1, 2
    fault_tolerance.replica_id = int(os.environ.get("REPLICA", "0"))
    fault_tolerance.min_replica_size = options.min_replicas
    trainer = config.build()
    manager = trainer.ft_manager.manager
    manager.attach(*trainer.optimizers.optimizers, every_commit=False)
    trainer.train()
    weights = f"{state_digest(trainer.model_parts[0].state_dict()):016x}"
    print(f"step {manager.current_step()} replicas {manager.num_participants()} weights {weights}", flush=True)
    manager.shutdown()
    trainer.close()


if __name__ == "__main__":
    main()
