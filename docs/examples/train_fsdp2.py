"""Train replicas of several FSDP2 ranks each; a replica that was killed heals rank by rank.

Start a Lighthouse, then one torchrun for each replica::

    RUST_LOG=error torchft_lighthouse --min_replicas 1 --join_timeout_ms 80000 --heartbeat_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --standalone --nproc-per-node 2 train_fsdp2.py
    REPLICA=1 torchrun --standalone --nproc-per-node 2 train_fsdp2.py

torchrun ends all ranks of its launch together, so each replica has a launch of its own.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ft_transport import state_digest
from manager import Manager

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--min-replicas", type=int, default=1)
options = parser.parse_args()


def main() -> None:
    """Train until the step that was asked for is committed."""
    replica = int(os.environ.get("REPLICA", "0"))
    dist.init_process_group("gloo")  # of this replica alone; "nccl" on GPUs
    torch.manual_seed(replica)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    manager = Manager(
        min_replica_size=options.min_replicas, replica_id=f"fsdp2_{replica}", timeout=timedelta(seconds=15)
    )
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)

    # Every rank of every replica draws batches of its own.
    generator = torch.Generator().manual_seed(1000 * replica + dist.get_rank())
    while manager.current_step() < options.steps:
        manager.start_quorum()
        features = torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), (features[:, 0] > features[:, 1]).long())
        loss.backward()  # FSDP2 reduces inside the replica
        manager.average_gradients(model)  # the local shards, over the replicas
        if manager.should_commit():
            optimizer.step()
        shards = {name: parameter.detach().to_local() for name, parameter in model.named_parameters()}
        weights = f"{state_digest(shards):016x}"
        step, rank, replicas = manager.current_step(), dist.get_rank(), manager.num_participants()
        print(f"step {step} rank {rank} loss {loss.item():.4f} replicas {replicas} weights {weights}", flush=True)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
