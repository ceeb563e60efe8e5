"""Two ranks of one replica, each with a manager and one store; started by `ranks`. Usage: ``... ROOT``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import fork_writers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_transport import CheckpointStore, HTTPTransport, RankFailedError, StoreSettings, TransportSettings, state_digest
from manager import ManagerError, RecoveryFailedError, StateManager, StateTornError

TIMEOUT = timedelta(seconds=20)
NOBODY = "http://127.0.0.1:9/checkpoint/"


class Replica:
    """One rank's part of a replica."""

    def __init__(self, root: Path, *, is_reversed: bool = False) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 5))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters[::-1] if is_reversed else parameters, lr=0.01)
        self.drawn = 0
        self.store = CheckpointStore(root, settings=StoreSettings(timeout=TIMEOUT))
        self.transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
        self.manager = StateManager(
            checkpoint_transport=self.transport, checkpoint_store=self.store, save_every=2, timeout=TIMEOUT
        )
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.register_state_dict_fn("loader", self._load_loader, lambda: {"drawn": self.drawn}, scope="local")
        self.attachment = self.manager.attach(self.optimizer)

    def _load_loader(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.manager.start_step(step)
            self.drawn += 10 + self.rank
            torch.manual_seed(1000 * self.rank + step)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 32)).square().mean().backward()
            self.optimizer.step()
        self.manager.start_step(end)

    def digest(self) -> str:
        return str(state_digest([self.model.state_dict(), self.optimizer.state_dict()]))

    def close(self) -> None:
        self.attachment.remove()
        self.manager.shutdown()


def main() -> None:
    root = Path(sys.argv[1])
    fork_writers()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    first = Replica(root / "a")
    first.train(0, 5)
    first.store.wait()
    assert first.store.steps() == (2, 4)
    first.train(5, 8)
    expected = first.digest()
    first.close()

    # One rank takes over the order of the checkpoint, and all of them load it once more.
    second = Replica(root / "a", is_reversed=rank == 1)
    recovery = second.manager.resume()
    assert recovery is not None
    # Steps 6 and 8 were saved as well; the step that was saved last is the one that was reached.
    assert (recovery.step, second.digest(), second.drawn) == (8, expected, 8 * (10 + rank))

    # A peer that only rank 0 reaches: nobody keeps what it sent.
    other = Replica(root / "b")
    other.train(0, 3)
    other.manager.snapshot(3).result(20)
    address = other.manager.metadata() if rank == 0 else NOBODY
    with_peer = second.manager.recover(address, step=3, timeout=timedelta(seconds=2))
    assert (with_peer.step, second.digest()) == (8, expected)
    recovered = second.manager.recover(other.manager.metadata(), step=3, timeout=timedelta(seconds=10))
    assert (recovered.step, second.digest()) == (3, other.digest())
    second.close()

    # Without a checkpoint, a rank that has recovered alone must not step.
    third = Replica(root / "c")
    with pytest.raises(RecoveryFailedError):
        third.manager.recover(address, step=3, timeout=timedelta(seconds=2))
    with pytest.raises(StateTornError) if rank == 0 else nullcontext():
        third.manager.snapshot().result(20)

    # What one rank refuses is told to the other, and both go on together.
    if rank == 1:
        other.optimizer.step()
    with pytest.raises(ManagerError if rank == 1 else RankFailedError, match="expected a step boundary"):
        other.manager.save(wait=True)
    if rank == 0:
        other.optimizer.step()
    other.manager.start_step(4)
    other.manager.save(wait=True, overwrite=True)
    assert 4 in other.store.steps()
    third.close()
    other.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
