"""A replica that trains a small model under a quorum, a process of its own. It reports in lines of JSON.

Every line has ``event`` and ``replica``. ``boundary``: a step begins; ``step`` and ``digest`` say which committed state
the replica holds. ``committed``: the step that was just committed, before the optimizer made it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from ft_transport import FetchProgress, HTTPTransport, TransportSettings, state_digest
from manager import Manager, ManagerConfig


def report(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class SlowReceiver:
    """Called with each chunk that has landed: holds the others back, and tells of the first."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._started_s = 0.0
        self._source = ""

    def begin(self, source: str) -> None:
        self._source, self._started_s = source, time.monotonic()

    def __call__(self, progress: FetchProgress) -> None:
        if self._source:
            report("receiving", source=self._source)
            self._source = ""
        if self._bytes_per_s is not None:
            due_s = self._started_s + progress.done_bytes / self._bytes_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))


class ReportingTransport(HTTPTransport[Any]):
    """Says where it fetches from."""

    receiver: SlowReceiver

    def fetch(self, metadata: str, *arguments: Any, **keywords: Any) -> Any:
        self.receiver.begin(metadata)
        return super().fetch(metadata, *arguments, **keywords)


class SlowData(Dataset[int]):
    """Its worker does not look after its parent while it draws anything but the first item."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        time.sleep(30 if index else 0)
        return index


def leave_children() -> object:
    """A program that is started as a shell does it, and a worker of a data loader, which is forked."""
    # Of what the replica's reader waits for the end of, no child keeps anything.
    null = os.open(os.devnull, os.O_RDWR)
    files = [(os.POSIX_SPAWN_DUP2, null, number) for number in (1, 2)]
    os.posix_spawn("/bin/sleep", ["sleep", "30"], os.environ, file_actions=files)

    def begin(_worker: int) -> None:
        for number in (1, 2):
            os.dup2(null, number)

    drawing = iter(DataLoader(SlowData(), num_workers=1, worker_init_fn=begin))
    next(drawing)
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes at least")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--receive-bytes-per-s", type=float)
    parser.add_argument("--keep-every", type=int, help="also resumes, and expects preemptions")
    parser.add_argument("--leave-children", action="store_true", help="once there are two replicas")
    arguments = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(hash(arguments.name) % 2**31)

    width = arguments.width
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.9)
    local = {"drawn": 0}
    config = ManagerConfig(
        min_replica_size=1,
        replica_id=arguments.name,
        timeout=timedelta(seconds=arguments.timeout_s),
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=timedelta(seconds=min(arguments.timeout_s, 3.0)),
        heartbeat_timeout=timedelta(seconds=1),
    )
    receiver = SlowReceiver(arguments.receive_bytes_per_s)
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", on_progress=receiver)
    transport = ReportingTransport(config.timeout, settings=settings)
    transport.receiver = receiver
    manager = Manager(config=config, checkpoint_transport=transport, keep_every=arguments.keep_every)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.register("scheduler", scheduler)
    manager.register_state_dict_fn("data", local.update, lambda: dict(local), scope="local")
    manager.attach(optimizer)
    if arguments.keep_every:
        manager.on_preemption()
        recovery = manager.resume()
        report("resumed", step=recovery.step if recovery is not None else 0)
    report("ready", replica=manager.replica_id(), address=manager.metadata())
    children: object = None
    while True:  # until it is killed
        started_s = time.monotonic()
        manager.start_quorum()
        step = manager.current_step()
        report(
            "boundary",
            step=step,
            digest=f"{state_digest(manager.replica_state()):016x}",
            lr=optimizer.param_groups[0]["lr"],
            drawn=local["drawn"],
        )
        local["drawn"] += 1
        optimizer.zero_grad()
        inputs = torch.randn(8, width)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        time.sleep(max(0.0, arguments.step_s - (time.monotonic() - started_s)))
        if children is not None:
            report("reducing", step=step)
        works = [manager.allreduce(parameter.grad) for parameter in model.parameters()]
        for work in works:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            scheduler.step()
            report("committed", step=manager.current_step(), participants=manager.num_participants())
            if arguments.leave_children and children is None and manager.num_participants() > 1:
                children = leave_children()
                report("left children")


if __name__ == "__main__":
    main()
