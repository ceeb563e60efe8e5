"""Train islands with DiLoCo: each makes inner steps of its own, and they average every few steps over a slow network.

Start a Lighthouse, then one island in each terminal::

    RUST_LOG=error torchft_lighthouse --min_replicas 1 --join_timeout_ms 80000 --heartbeat_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    ISLAND=0 python train_diloco.py
    ISLAND=1 python train_diloco.py

torchft's ``DiLoCo`` runs unchanged on this package's Manager. ``guard_diloco`` makes its syncs exclude readers.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from ft_transport import state_digest
from manager import Manager, guard_diloco

parser = argparse.ArgumentParser()
parser.add_argument("--syncs", type=int, default=20, help="outer steps to make")
parser.add_argument("--sync-every", type=int, default=5, help="inner steps between them")
parser.add_argument("--min-islands", type=int, default=1)
options = parser.parse_args()


def main() -> None:
    """Train until so many outer steps are committed."""
    island = int(os.environ.get("ISLAND", "0"))
    torch.manual_seed(island)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    manager = Manager(
        min_replica_size=options.min_islands,
        replica_id=f"island_{island}",
        use_async_quorum=False,  # DiLoCo asks for it
        timeout=timedelta(seconds=15),
    )
    manager.register("model", model)
    manager.register("inner", inner)
    manager.attach(inner)

    generator = torch.Generator().manual_seed(100 + island)
    with DiLoCo(manager, [model], inner, outer, sync_every=options.sync_every) as diloco:
        guard_diloco(manager, diloco)
        num_synced = 0
        while manager.current_step() < options.syncs:
            features = torch.randn(32, 16, generator=generator)
            inner.zero_grad()
            loss = nn.functional.cross_entropy(model(features), (features[:, 0] > features[:, 1]).long())
            loss.backward()
            inner.step()  # every sync_every-th call ends with an outer step: quorum, average, commit
            step = manager.current_step()
            if step != num_synced:
                num_synced = step
                weights = f"{state_digest(model.state_dict()):016x}"
                replicas = manager.num_participants()
                print(f"step {step} loss {loss.item():.4f} replicas {replicas} weights {weights}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
