"""How a trainer serves its state at a step: by our manager, and as torchft's manager does it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from benchmarks import transports
from benchmarks.replicas.training import Training
from benchmarks.report import Role
from ft_transport import HTTPTransport, TransportSettings
from ft_transport.state.copying import CopiesInFlight
from ft_transport.transfer.server import SnapshotInProgress
from manager import Manager


class Side(Protocol):
    """What differs between ours and torchft's."""

    name: str
    role: Role

    def begin_step(self, step: int) -> None:
        """At the top of an iteration."""

    def before_optimizer(self) -> None:
        """Between backward and the optimizer's step."""

    def url(self, step: int) -> str:
        """What the receiver reads, if it is told so some steps before ``step``."""

    def clone_s(self) -> float | None:
        """How long the last snapshot held the lock."""

    def prefault(self) -> None:
        """Between two steps: uses every buffer once, so that none has to be made any more."""

    def close(self) -> None: ...


class _TimedClones:
    """Notes how long the parts of a snapshot take that the lock is held for."""

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self._take = transport.server.take
        self.last_clone_s: float | None = None
        transport.server.take = self.take  # type: ignore[method-assign]

    def take(self, wanted: Any, **options: Any) -> SnapshotInProgress:
        started_s = time.monotonic()
        in_progress = self._take(wanted, **options)
        begin_s = time.monotonic() - started_s
        copy_deferred = in_progress.copy_deferred

        def timed_copy() -> CopiesInFlight | None:
            copy_started_s = time.monotonic()
            in_flight = copy_deferred()
            self.last_clone_s = begin_s + time.monotonic() - copy_started_s
            return in_flight

        in_progress.copy_deferred = timed_copy  # type: ignore[method-assign]
        return in_progress


class Ours:
    name = "ft_transport"
    role: Role = "ours"

    def __init__(self, training: Training) -> None:
        self._transport = HTTPTransport[Any](settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
        self._clones = _TimedClones(self._transport)
        self._manager = Manager(checkpoint_transport=self._transport)
        self._manager.register("model", training.model)
        self._manager.register("optimizer", training.optimizer)
        self._manager.attach(training.optimizer)

    def begin_step(self, step: int) -> None:
        self._manager.start_step(step)

    def before_optimizer(self) -> None:
        """The hook that ``attach`` registered waits inside of ``optimizer.step``."""

    def url(self, _step: int) -> str:
        return f"{self._transport.metadata()}latest/full"

    def clone_s(self) -> float | None:
        return self._clones.last_clone_s

    def prefault(self) -> None:
        # The last step has ended.
        step = self._manager.current_step() + 1
        for _ in range(TransportSettings().limits.max_snapshots):
            self._manager.snapshot(step).result()

    def close(self) -> None:
        self._manager.shutdown()


class Torchft:
    name = "torchft"
    role: Role = "peer"

    def __init__(self, training: Training) -> None:
        self._training = training
        self._transport = transports.torchft_http_transport(0)
        self._quorum_thread = ThreadPoolExecutor(1)
        self._send_at: int | None = None

    def begin_step(self, step: int) -> None:
        if step == self._send_at:
            # As Manager.start_quorum does; the trainer's first all-reduce waits for the thread.
            state = {"model": self._training.model.state_dict(), "optimizer": self._training.optimizer.state_dict()}
            send = self._transport.send_checkpoint
            self._quorum_thread.submit(send, [1], step, state, transports.TIMEOUT).result()

    def before_optimizer(self) -> None:
        self._transport.disallow_checkpoint()

    def url(self, step: int) -> str:
        self._send_at = step
        return f"{transports.on_loopback(self._transport.metadata())}{step}/full"

    def clone_s(self) -> float | None:
        return None

    def prefault(self) -> None:
        """It has no buffers."""

    def close(self) -> None:
        self._quorum_thread.shutdown()
        self._transport.shutdown()
