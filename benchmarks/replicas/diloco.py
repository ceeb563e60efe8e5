"""Two replicas under torchft's DiLoCo on our manager: each trains for itself, but for a sync every few steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.machine import back_free_memory, processor_wait_s, stolen_s
from benchmarks.processes import Channel
from benchmarks.replicas.healing import WARM
from benchmarks.replicas.managers import join_at_once
from benchmarks.replicas.steps import READY
from benchmarks.transports import TIMEOUT, our_transport

_SYNC_EVERY: Final = 6
_NUM_LAYERS: Final = 8
_NUM_ROWS: Final = 32
_FILLED_TIMES: Final = 4
"""Parameters, their gradients and pseudo-gradients, the global ones and their momentum, each half a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One inner step, with the sync that may follow: when it began, and how long it took, in seconds.

    Attributes:
        began_s: On the monotonic clock.
        took_s: All of it.
        waited_s: For how much of that it had no processor.
        stolen_s: For how much of it the machine's host took processors away.
        is_sync: Whether a sync followed.
    """

    began_s: float
    took_s: float
    waited_s: float
    stolen_s: float
    is_sync: bool

    @property
    def ended_s(self) -> float:
        return self.began_s + self.took_s


def train(channel: Channel, num_bytes: int, warm_join: bool, lighthouse: str, num_syncs: int) -> None:
    """Steps without pause, says `WARM` after ``num_syncs``, and its iterations when it is told to."""
    replica = _Replica(channel, num_bytes, warm_join, "trains", lighthouse)
    replica.synchronize(num_syncs)
    channel.say(WARM)
    while not channel.has_message():
        replica.step()
    channel.say(replica.iterations)
    channel.wait_for_end()


def join(channel: Channel, num_bytes: int, warm_join: bool, lighthouse: str, num_syncs: int) -> None:
    """Steps, says its iterations after ``num_syncs``, and goes on."""
    replica = _Replica(channel, num_bytes, warm_join, "joins", lighthouse)
    replica.synchronize(num_syncs)
    channel.say(replica.iterations)
    while True:
        replica.step()


class _Replica:
    """Says `READY` twice, as the replicas of ``heal`` do. Global parameters and their momentum have ``num_bytes``."""

    def __init__(self, channel: Channel, num_bytes: int, warm_join: bool, name: str, lighthouse: str) -> None:
        torch.set_num_threads(1)
        width = int((num_bytes / 2 / 4 / _NUM_LAYERS) ** 0.5)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_NUM_LAYERS)]
        self._model = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.Tanh())))
        self._batch = torch.randn(_NUM_ROWS, width)
        channel.say(READY)
        channel.wait()
        back_free_memory(_FILLED_TIMES * num_bytes)
        channel.say(READY)
        channel.wait()
        self._backward()
        self._inner = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._diloco: Any = self._under_diloco(name, lighthouse, warm_join)
        self._num_syncs = 0
        self.iterations: list[Iteration] = []

    def synchronize(self, num_syncs: int) -> None:
        while self._manager.current_step() < num_syncs or self._num_syncs < num_syncs:
            self.step()

    def step(self) -> None:
        before, stolen_before_s = self._diloco._local_step, stolen_s()
        began_s, waited_s = time.monotonic(), processor_wait_s()
        self._inner.zero_grad()
        self._backward()
        self._inner.step()
        is_sync = self._diloco._local_step <= before
        self._num_syncs += is_sync
        took_s, waited_s = time.monotonic() - began_s, processor_wait_s() - waited_s
        taken_s = stolen_s() - stolen_before_s
        self.iterations.append(
            Iteration(began_s=began_s, took_s=took_s, waited_s=waited_s, stolen_s=taken_s, is_sync=is_sync)
        )

    def _backward(self) -> None:
        self._model(self._batch).square().mean().backward()

    def _under_diloco(self, name: str, lighthouse: str, warm_join: bool) -> Any:
        from torchft.local_sgd import DiLoCo

        from manager import Manager, ManagerConfig, guard_diloco

        config = ManagerConfig(
            min_replica_size=1,
            replica_id=name,
            timeout=TIMEOUT,
            lighthouse_addr=lighthouse,
            use_async_quorum=False,
        )
        if not warm_join:
            join_at_once()
        self._manager = Manager(config=config, checkpoint_transport=our_transport())
        self._manager.attach(self._inner, every_commit=False)
        outer = torch.optim.SGD(self._model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = DiLoCo(self._manager, [self._model], self._inner, outer, sync_every=_SYNC_EVERY)
        guard_diloco(self._manager, diloco)
        return diloco.__enter__()
