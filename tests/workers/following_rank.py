"""One rank of an FSDP2 replica that follows the others when it joins: ``following_rank.py DIRECTORY REPLICA``.

The lines of JSON in ``REPLICA-RANK.txt`` are reports: ``boundary`` with the digest of the state of a step to which the
rank contributes, and ``joined`` with what the record of a recovery says about the replay.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ft_transport import HTTPTransport, TransportSettings, state_digest
from manager import Manager, ManagerConfig
from manager.quorum import following

WIDTH = 64
STEP_S = 0.05
_MAX_DELAY_S = 1.0
"""A newcomer receives for up to so long, twenty steps."""


class SlowTransport(HTTPTransport[Any]):
    def fetch(self, *args: Any, **options: Any) -> Any:
        received = super().fetch(*args, **options)
        if threading.current_thread().name.startswith("ft-transport-follow"):
            time.sleep(random.uniform(0, _MAX_DELAY_S))
        return received


def main() -> None:
    directory, replica = Path(sys.argv[1]), sys.argv[2]
    number = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    following._LEAST_BYTES = 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    adam = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    sgd = torch.optim.SGD(model[2].parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9999)
    config = ManagerConfig(
        min_replica_size=1,
        replica_id=replica,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=timedelta(seconds=3),
        replay_bytes=1 << 30,
    )
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", same_host=False)
    transport = SlowTransport(config.timeout, settings=settings)
    manager = Manager(config=config, checkpoint_transport=transport)
    for name, part in (("model", model), ("adam", adam), ("sgd", sgd), ("schedule", schedule)):
        manager.register(name, part)
    manager.attach(adam, sgd)
    reports = (directory / f"{replica}-{number}.txt").open("a", buffering=1)
    num_joined = 0
    while True:
        started_s = time.monotonic()
        manager.start_quorum()
        manager.wait_quorum()
        contributes = manager.is_participating() and manager.errored() is None
        if contributes:
            digest = f"{state_digest(manager.replica_state()):016x}"
            reports.write(json.dumps({"event": "boundary", "step": manager.current_step(), "digest": digest}) + "\n")
        torch.manual_seed(manager.current_step() * 7 + sum(map(ord, replica)))
        model(torch.randn(8, WIDTH)).square().mean().backward()
        time.sleep(max(0.0, STEP_S - (time.monotonic() - started_s)))
        manager.average_gradients(model)
        if manager.should_commit():
            adam.step()
            sgd.step()
            adam.zero_grad()
            sgd.zero_grad()
            schedule.step()
        joined = [each for each in transport.recorder.recent() if each.kind == "heal" and each.outcome == "ok"]
        for each in joined[num_joined:]:
            reports.write(json.dumps({"event": "joined", "step": each.step, **each.notes}) + "\n")
        num_joined = len(joined)


if __name__ == "__main__":
    main()
