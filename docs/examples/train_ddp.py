"""Train a small classifier in data-parallel replicas with torchft's classes; only the import of Manager differs.

Start a Lighthouse, then one replica in each terminal::

    RUST_LOG=error torchft_lighthouse --min_replicas 1 --join_timeout_ms 80000 --heartbeat_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA_GROUP_ID=0 torchrun --standalone --nproc-per-node 1 train_ddp.py --with ft_transport
    REPLICA_GROUP_ID=1 torchrun --standalone --nproc-per-node 1 train_ddp.py --with ft_transport

The loop has the shape of ``train_ddp.py`` in torchft's repository. End a replica with SIGKILL and start it again.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Optimizer, ProcessGroupGloo

from ft_transport import state_digest

parser = argparse.ArgumentParser()
parser.add_argument("--with", dest="manager", choices=("torchft", "ft_transport"), default="ft_transport")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--min-replicas", type=int, default=1)
options = parser.parse_args()

if options.manager == "torchft":
    from torchft import Manager
else:
    from manager import Manager


def synthetic_data() -> TensorDataset:
    """Return the same 4,096 examples on every replica: 16 features, and a label that follows from two of them."""
    features = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, (features[:, 0] > features[:, 1]).long())


def main() -> None:
    """Train until the step that was asked for is committed."""
    replica = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    num_replicas = int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    torch.manual_seed(replica)  # replicas begin with other weights; the first quorum makes them equal

    data = synthetic_data()
    sampler = DistributedSampler(
        data, replica_rank=replica, num_replica_groups=num_replicas, group_rank=0, num_replicas=1, shuffle=True
    )
    batches = DataLoader(data, batch_size=32, sampler=sampler)

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=options.min_replicas,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{replica}",
        timeout=timedelta(seconds=15),
    )
    model = DistributedDataParallel(manager, nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))
    criterion = nn.CrossEntropyLoss()

    while manager.current_step() < options.steps:
        for features, labels in batches:
            optimizer.zero_grad()  # begins the quorum
            loss = criterion(model(features), labels)
            loss.backward()  # gradients are averaged meanwhile
            optimizer.step()  # only if the step is committed
            step = manager.current_step()
            weights = f"{state_digest(model.state_dict()):016x}"
            replicas = manager.num_participants()
            print(f"step {step} loss {loss.item():.4f} replicas {replicas} weights {weights}", flush=True)
            if step >= options.steps:
                break
    manager.shutdown()


if __name__ == "__main__":
    main()
