"""One rank of a replica that is preempted at a given moment of a step: ``preempted_rank.py DIRECTORY REPLICA``.

A file ``REPLICA-RANK.signal`` with the name of a moment makes the rank send itself a SIGTERM at that moment. The
lines of JSON in ``REPLICA-RANK.txt`` have the time of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ft_transport import CheckpointStore, FetchProgress, HTTPTransport, TransportSettings, state_digest
from manager import Manager, ManagerConfig

WIDTH = int(os.environ.get("PREEMPTED_WIDTH", "256"))
GRACE_S = float(os.environ.get("PREEMPTED_GRACE_S", "20"))
STEP_S = 0.1
SAVE_EVERY = 4
_SOON_S = 0.003


class Rank:
    """Where this rank is in its step."""

    def __init__(self, directory: Path, name: str) -> None:
        self._wanted = directory / f"{name}.signal"
        self._notes = (directory / f"{name}.txt").open("a", buffering=1)

    def report(self, event: str, **fields: object) -> None:
        self._notes.write(json.dumps({"event": event, "at_s": time.monotonic(), **fields}) + "\n")

    def reach(self, moment: str, delay_s: float = 0.0) -> None:
        if self._wanted.exists() and self._wanted.read_text() == moment:
            self._wanted.unlink()
            threading.Timer(delay_s, self._signal, [moment]).start()
            if not delay_s:
                # The thread of the timer sends the signal while this rank is still in this moment.
                time.sleep(_SOON_S)

    def _signal(self, moment: str) -> None:
        self.report("signalled", moment=moment)
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    directory, replica = Path(sys.argv[1]), sys.argv[2]
    number = int(os.environ["RANK"])
    rank = Rank(directory, f"{replica}-{number}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(sum(map(ord, replica)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = ManagerConfig(
        min_replica_size=1,
        replica_id=replica,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=timedelta(seconds=5),
        heartbeat_timeout=timedelta(seconds=5),
    )

    def note(_progress: FetchProgress) -> None:
        rank.reach("heal")

    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", on_progress=note, same_host=False)
    manager = Manager(
        config=config,
        checkpoint_transport=HTTPTransport(config.timeout, settings=settings),
        keep_every=1000,
        checkpoint_store=CheckpointStore(directory / f"{replica}-checkpoints", keep=2),
    )
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    drawn: dict[str, int] = {"number": 0}
    manager.register_state_dict_fn("data", drawn.update, lambda: dict(drawn), scope="local")
    manager.attach(optimizer)
    manager.on_preemption(grace=timedelta(seconds=GRACE_S))
    recovery = manager.resume()
    rank.report("resumed", step=manager.current_step(), source=recovery.source if recovery is not None else "")
    try:
        train(rank, manager, model, optimizer, drawn)
    finally:
        rank.report("ending")


def train(
    rank: Rank, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, drawn: dict[str, int]
) -> NoReturn:
    while True:
        started_s = time.monotonic()
        rank.reach("quorum", _SOON_S)
        manager.start_quorum()
        step = manager.current_step()
        rank.report("boundary", step=step, digest=f"{state_digest(manager.replica_state()):016x}")
        if step % SAVE_EVERY == 0:
            manager.save()
            rank.reach("save", _SOON_S)
        drawn["number"] += 1
        optimizer.zero_grad()
        rank.reach("forward")
        torch.manual_seed(step)
        model(torch.randn(8, WIDTH)).square().mean().backward()
        time.sleep(max(0.0, STEP_S - (time.monotonic() - started_s)))
        rank.reach("reduce", _SOON_S)
        manager.average_gradients(model)
        rank.reach("commit", _SOON_S / 10)
        if manager.should_commit():
            optimizer.step()
            rank.report("committed", step=manager.current_step())


if __name__ == "__main__":
    main()
