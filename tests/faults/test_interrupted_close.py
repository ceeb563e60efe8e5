"""A signal handler that raises anywhere in a close: the next call ends what that one had not, and comes back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import at_every_place
from served_memory import until

from ft_transport import CheckpointStore, HTTPTransport, Publisher, StoreSettings, TransportSettings, WeightReceiver
from ft_transport.runtime.threads import SafeExecutor

SECOND = timedelta(seconds=10)
LOOPBACK = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")


def transport(_directory: Path) -> HTTPTransport[Any]:
    made: HTTPTransport[Any] = HTTPTransport(SECOND, settings=LOOPBACK)
    made.send_checkpoint([], 1, {"weight": torch.ones(3)}, SECOND)
    return made


def executor(_directory: Path) -> SafeExecutor:
    made = SafeExecutor(2, "ft-transport-test")
    made.submit(int).result(10)
    return made


def store(directory: Path) -> CheckpointStore:
    return CheckpointStore(directory / "checkpoints", settings=StoreSettings(timeout=SECOND))


def publisher(directory: Path) -> Publisher:
    made = Publisher([], directory / "versions", policy="best_effort", timeout=SECOND)
    made.publish(next(_versions), {"weight": torch.ones(3)}).report(SECOND)
    return made


def receiver(_directory: Path) -> WeightReceiver:
    return WeightReceiver({"weight": torch.ones(3)}, host="127.0.0.1")


def num_threads() -> int:
    """Those that run: the library still counts one whose ``join`` was interrupted."""
    return sum(thread.is_alive() for thread in threading.enumerate())


_versions = itertools.count(1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "end"),
    [
        pytest.param(transport, lambda each: each.shutdown(), id="transport"),
        pytest.param(executor, lambda each: each.shutdown(), id="executor"),
        pytest.param(store, lambda each: each.close(), id="store"),
        pytest.param(publisher, lambda each: each.close(), id="publisher"),
        pytest.param(receiver, lambda each: each.close(), id="receiver"),
    ],
)
def test_closing_can_be_interrupted_anywhere_and_called_again(
    make: Callable[[Path], Any], end: Callable[[Any], None], tmp_path: Path
) -> None:
    before = num_threads()
    open_ones = []

    def close() -> None:
        end(open_ones[-1])

    def close_again() -> None:
        again = threading.Thread(target=end, args=(open_ones.pop(),), daemon=True)
        again.start()
        again.join(10)
        assert not again.is_alive(), "closing again does not come back"
        until(lambda: num_threads() <= before)  # A thread of an earlier test may have ended meanwhile.
        open_ones.append(make(tmp_path))

    open_ones.append(make(tmp_path))
    try:
        at_every_place(close, close_again, at_least=5)
    finally:
        end(open_ones.pop())
