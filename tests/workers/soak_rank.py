"""One rank of a replica that trains until it is told to end, a process of its own; `soak` starts and disturbs it.

Usage: ``soak_rank.py REPLICA``, with torchrun's environment. Lines on stdin are faults (`Faults`), a SIGUSR1 raises in
the training loop, and every line on stdout is a report in JSON:

``boundary``: a step begins, and this rank holds the state of ``step`` and ``lineage``, whose digest follows; with it
come the process's memory, descriptors and threads. ``slow``: a call took longer than a second. ``caught``: the loop
caught an exception and goes on. ``done``: a fault has happened. ``differs``: the comparison has found a state.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from ft_transport import HTTPTransport, TransportSettings, state_digest
from manager import Manager, ManagerConfig
from manager.quorum import following

T = TypeVar("T")

COMPARE_EVERY = 5
TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
QUORUM_TIMEOUT_S = 30.0
HEARTBEAT_TIMEOUT_S = 1.0
START_QUORUM_S = 30.0
SHOULD_COMMIT_S = 15.0

REPLAY_BYTES = int(os.environ.get("SOAK_REPLAY_BYTES", "0"))
"""Newcomers follow the others, and record gradients of this size at most, while they receive the state."""

_STEP_S = 0.05
_CALLS = ("start_quorum", "wait_quorum", "allreduce", "wait", "should_commit", "step")
_SLOW_S = 1.0
_PAUSE_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def report(event: str, **fields: object) -> None:
    # One write, so that a signal handler that raises leaves no half of a line.
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


class HandlerError(Exception):
    """Raised by the signal handler."""


class OptimizerError(Exception):
    """Raised in the middle of a step."""


class Faults:
    """What this rank shall do wrong next. The training thread takes it, a thread reads it from stdin."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        self.is_over = False
        self.may_raise = False
        self._mutex = threading.Lock()
        signal.signal(signal.SIGUSR1, self._raise)
        signal.signal(signal.SIGALRM, self._raise)
        threading.Thread(target=self._read, daemon=True, name="faults").start()

    def take(self, name: str, step: int) -> bool:
        if name not in self._wanted:
            return False
        self._wanted.discard(name)
        report("done", fault=name, step=step)
        return True

    def _read(self) -> None:
        for line in sys.stdin:
            name, *arguments = line.split()
            if name == "hold_gil":
                begin_s = time.monotonic()
                ctypes.PyDLL(None).usleep(int(float(arguments[0]) * 1e6))
                report("done", fault=name, begin_s=begin_s, end_s=time.monotonic())
            elif name == "end":
                self.is_over = True
            else:
                self._wanted.add(name)
        self.is_over = True

    def _raise(self, _signum: int, frame: FrameType | None) -> None:
        if self.may_raise:
            self.may_raise = False
            where = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in traceback.extract_stack(frame)]
            report("done", fault="handler", where=where[-6:])
            raise HandlerError


class FailingSGD(torch.optim.SGD):
    """Fails once when told so, with one parameter changed and the others not."""

    is_to_fail = False

    def step(self, closure: Any = None) -> Any:
        if self.is_to_fail:
            self.is_to_fail = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise OptimizerError
        return super().step(closure)


class Differences(logging.Handler):
    """Reports what the comparison of states logs."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR and "differs from that of most" in message:
            report("differs", message=message)


class Trainer:
    def __init__(self, replica: str, group_rank: int) -> None:
        # Whatever a commit changes, an optimizer changes: an interrupted learning rate scheduler would go unnoticed.
        torch.manual_seed(random.randrange(2**31))  # the replicas begin with different weights
        width = 48 + 16 * group_rank  # Each rank has a part of its own.
        self.width = width
        self.model = nn.ModuleDict(
            {
                "hidden": nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()),
                "head": nn.Linear(width, width),
            }
        )
        self.adam = torch.optim.AdamW(self.model["hidden"].parameters(), lr=1e-2)
        # Newcomers follow only with torch's own optimizers.
        kind = torch.optim.SGD if REPLAY_BYTES else FailingSGD
        self.sgd: Any = kind(self.model["head"].parameters(), lr=1e-2, momentum=0.9)
        self.faults = Faults()
        config = ManagerConfig(
            min_replica_size=1,
            replica_id=replica,
            timeout=timedelta(seconds=TIMEOUT_S),
            quorum_timeout=timedelta(seconds=QUORUM_TIMEOUT_S),
            connect_timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            heartbeat_timeout=timedelta(seconds=HEARTBEAT_TIMEOUT_S),
            compare_every=COMPARE_EVERY,
            replay_bytes=REPLAY_BYTES or None,
        )
        settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
        transport = SlowTransport(config.timeout, settings=settings)
        self.manager = Manager(config=config, checkpoint_transport=transport)
        self.manager.register("model", self.model)
        self.manager.register("adam", self.adam)
        self.manager.register("sgd", self.sgd)
        self.manager.attach(self.adam, self.sgd)
        self.longest_s: dict[str, float] = {}
        self.interrupted_call = ""

    def run(self) -> None:
        while not self.faults.is_over:
            try:
                self._run_until_an_error()
            except Exception as error:  # where a handler raises while another error is caught
                self._caught(error)

    def _run_until_an_error(self) -> None:
        while not self.faults.is_over:
            try:
                self.faults.may_raise = True
                self.step()
            except Exception as error:
                self.faults.may_raise = False
                self._caught(error)

    def _caught(self, error: Exception) -> None:
        report("caught", step=self.manager.current_step(), error=f"{type(error).__name__}: {error}"[:400])
        logging.info("caught", exc_info=error)
        time.sleep(_PAUSE_S)

    def step(self) -> None:
        begin_s = time.monotonic()
        manager = self.manager
        if self.faults.take("interrupt", manager.current_step()):
            self.interrupted_call = random.choice(_CALLS)
        if self.faults.take("flip", manager.current_step()):
            self.flip()
        self.timed("start_quorum", lambda: manager.start_quorum(timeout=timedelta(seconds=START_QUORUM_S)))
        self.timed("wait_quorum", manager.wait_quorum)
        self.report_boundary()
        if self.faults.take("abandon", manager.current_step()):
            return
        for optimizer in (self.adam, self.sgd):
            optimizer.zero_grad()
        inputs = torch.randn(8, self.width)
        (self.model["head"](self.model["hidden"](inputs)) - inputs.flip(1)).square().mean().backward()
        if self.faults.take("report_error", manager.current_step()):
            manager.report_error(RuntimeError("told so"))
        gradients = [parameter.grad for parameter in self.model.parameters()]
        works = [
            self.timed("allreduce", lambda gradient=gradient: manager.allreduce(gradient)) for gradient in gradients
        ]  # type: ignore[misc]
        for work in works:
            self.timed("wait", work.wait)
        time.sleep(max(0.0, begin_s + _STEP_S - time.monotonic()))
        if self.timed("should_commit", lambda: manager.should_commit(timedelta(seconds=SHOULD_COMMIT_S))):
            if self.faults.take("skip_step", manager.current_step()):
                return
            self.timed("step", self.adam.step)
            self.sgd.is_to_fail = self.faults.take("fail_optimizer", manager.current_step())
            self.timed("step", self.sgd.step)

    def flip(self) -> None:
        """One bit of one number, as a bad memory module does."""
        with torch.no_grad():
            weight = self.model["head"].weight.view(torch.int32).flatten()
            weight[random.randrange(weight.numel())] ^= 1 << random.randrange(20)

    def report_boundary(self) -> None:
        manager = self.manager
        if manager.errored() is not None or not manager.is_participating():
            return
        digest = f"{state_digest(manager.replica_state()):016x}"
        if manager.errored() is not None:
            return
        report(
            "boundary",
            step=manager.current_step(),
            lineage=manager.state_dict()["lineage"],
            digest=digest,
            num_participants=manager.num_participants(),
            longest_s=self.longest_s,
            rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
            num_descriptors=_count(os.scandir("/proc/self/fd")),
            num_threads=_count(os.scandir("/proc/self/task")),
        )
        self.longest_s = {}

    def timed(self, name: str, call: Callable[[], T]) -> T:
        begin_s = time.monotonic()
        if self.interrupted_call == name:
            self.interrupted_call = ""
            # Soon after its beginning, or while it waits for others.
            signal.setitimer(signal.ITIMER_REAL, 10 ** random.uniform(-5, -1.5))
        try:
            return call()
        finally:
            end_s = time.monotonic()
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), end_s - begin_s)
            if end_s - begin_s > _SLOW_S:
                report("slow", call=name, begin_s=begin_s, end_s=end_s, step=self.manager.current_step())


def _count(entries: Iterable[object]) -> int:
    return sum(1 for _ in entries)


class SlowTransport(HTTPTransport[Any]):
    """Lets a newcomer that follows receive for up to 20 steps."""

    def fetch(self, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("ft-transport-follow"):
            time.sleep(random.uniform(0, 20 * _STEP_S))
        return super().fetch(*args, **options)


def main() -> None:
    faulthandler.enable()
    following._LEAST_BYTES = 0
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger().addHandler(Differences())
    torch.set_num_threads(1)
    trainer = Trainer(sys.argv[1], int(os.environ["RANK"]))
    report("ready", replica_id=trainer.manager.replica_id())
    trainer.run()
    trainer.manager.shutdown()
    report("end", step=trainer.manager.current_step())


if __name__ == "__main__":
    main()
