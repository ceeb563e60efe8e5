"""Two replicas under torchft's own Manager and Lighthouse, one of which fails and heals through our transport.

Prints JSON: the digest of each replica's parameters and optimizer state at the end, and the steps that were received.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from stepping_trainer import digest_of
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from ft_transport import HTTPTransport, TransportSettings

TIMEOUT = timedelta(seconds=30)
NUM_STEPS = 5
FAILING_STEP = 2
received_steps: list[int] = []
init_lock = threading.Lock()


class InjectedError(Exception):
    pass


class RecordingTransport(HTTPTransport[Any]):
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        received_steps.append(step)
        return state


def train(replica: int, attempt: int, lighthouse: str, seed: int) -> str:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with init_lock:  # all threads share the random state
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    # This module's own class is what the Manager is given: everything it calls is called here.
    transport = RecordingTransport(TIMEOUT, num_chunks=2, settings=TransportSettings(host="127.0.0.1"))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=state_dict,
        replica_id=f"replica{replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=TIMEOUT,
        checkpoint_transport=transport,
    )
    try:
        wrapped = DistributedDataParallel(manager, model)
        stepper = OptimizerWrapper(manager, optimizer)
        while manager.current_step() < NUM_STEPS:
            if replica == 1 and attempt == 0 and manager.current_step() == FAILING_STEP:
                raise InjectedError
            stepper.zero_grad()
            wrapped(torch.randn(16, 8)).square().mean().backward()
            stepper.step()
        return digest_of(state_dict())
    finally:
        manager.shutdown(wait=False)


def run_replica(replica: int, lighthouse: str) -> str:
    for attempt in range(3):
        try:
            return train(replica, attempt, lighthouse, seed=10 * replica + attempt)
        except InjectedError:
            continue
    raise RuntimeError(f"replica {replica} did not end")


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    try:
        with ThreadPoolExecutor(2) as pool:
            digests = list(pool.map(run_replica, range(2), [lighthouse.address()] * 2))
    finally:
        lighthouse.shutdown()
    print(json.dumps({"digests": digests, "received_steps": received_steps}))


if __name__ == "__main__":
    main()
