"""A replica with a process group of torchft's.

``torchft_group_replica.py LIGHTHOUSE NAME GROUP DEVICE LIMIT_S GROUP_LIMIT_S``: it prints ``ready``, and ``done`` after
each line that it was sent (`keepers.Trainer`). GROUP is the name of torchft's class, or ``Absent`` for a member that
meets the others in the store and then never connects.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torchft
from quorum_threads import make_manager


class Absent(SimpleNamespace):
    """A process group whose `configure` never returns."""

    def configure(self, *_: object) -> None:
        threading.Event().wait()


def step(value: float, *, is_spoiled: bool = False, side_stream: Any = None) -> tuple[list[float] | None, float, str]:
    """Make a step with gradients of ``value``.

    Returns:
        The averaged gradients, ``None`` if the step is not committed; the seconds of the step; its error.
    """
    started_s = time.monotonic()
    manager.start_quorum()
    # The gradients are computed late on the device, in the stream in which the reduction begins.
    with torch.cuda.stream(side_stream):
        if side_stream is not None:
            torch.cuda._sleep(200_000_000)
        weight.grad = torch.full_like(weight, value)
        manager.allreduce(weight.grad).wait()
        averaged = weight.grad.tolist() if side_stream is not None else []
    if is_spoiled:
        manager.report_error(ValueError("spoiled"))
    is_committed = manager.should_commit()
    error = str(manager.errored() or "")
    averaged = averaged or weight.grad.tolist()
    if is_committed:
        optimizer.step()
    return averaged if is_committed else None, time.monotonic() - started_s, error


def train(value: float, num_members: int) -> list[float]:
    """Make steps until one is committed with so many replicas, and return its averaged gradients."""
    while True:
        averaged, _, _ = step(value)
        if averaged is not None and manager.num_participants() == num_members:
            return averaged


if __name__ == "__main__":
    address, name, group_name, device, limit_s, group_limit_s = sys.argv[1:]
    limit = timedelta(seconds=float(limit_s))
    if device != "cpu":
        torch.cuda.set_device(device)
    group_limit = timedelta(seconds=float(group_limit_s))
    group: Any = Absent() if group_name == "Absent" else getattr(torchft, group_name)(timeout=group_limit)
    weight = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    manager = make_manager(address, name, pg=group, timeout=limit, connect_timeout=limit)
    manager.register("weight", torch.nn.ParameterList([weight]))
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)
    print("ready", flush=True)
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
