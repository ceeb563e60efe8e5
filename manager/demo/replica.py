"""One replica of the demo, a process of its own. It reports to its parent in lines of JSON on standard output."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from ft_transport import FetchProgress, HTTPTransport, TransportSettings, state_digest
from manager import Manager, OptimizerAttachment, RandomState
from manager.demo.language_model import LanguageModel, Text

_TIMEOUT: Final = timedelta(seconds=60)
_PROGRESS_EVERY_S: Final = 0.005


def report(event: str, **fields: object) -> None:
    """Sends one event to the parent."""
    print(json.dumps({"event": event, **fields}), flush=True)


@dataclass(slots=True, kw_only=True)
class Replica:
    """Everything that one replica trains with."""

    text: Text
    model: LanguageModel
    optimizer: AdamW
    scheduler: CosineAnnealingLR
    manager: Manager
    attachment: OptimizerAttachment
    address: str

    @classmethod
    def build(cls, *, seed: int, width: int, num_layers: int) -> Replica:
        """A replica with weights of its own, serving on the loopback address."""
        torch.manual_seed(seed)
        text = Text.from_python_documentation()
        model = LanguageModel(text.vocabulary, width=width, num_layers=num_layers)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        scheduler = CosineAnnealingLR(optimizer, T_max=1000)
        settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", on_progress=_ProgressReporter())
        transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, settings=settings)
        manager = Manager(checkpoint_transport=transport, timeout=_TIMEOUT)
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        manager.register("scheduler", scheduler)
        # Replicated here, because both replicas train on the same batches and must draw the same dropout.
        manager.register("random", RandomState())
        return cls(
            text=text,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            manager=manager,
            attachment=manager.attach(optimizer),
            address=transport.metadata(),
        )

    def train_step(self, step: int) -> None:
        """One step from boundary to boundary, reported with its loss and the digest of the state that it began with."""
        started_s = time.perf_counter()
        self.manager.start_step(step)
        boundary_s = time.perf_counter() - started_s
        # Only the demo looks at its whole state in every step; that is not part of the step's time.
        digest = state_digest(self.manager.replica_state())
        resumed_s = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model.loss(*self.text.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        report(
            "step",
            step=step,
            loss=loss.item(),
            digest=f"{digest:016x}",
            seconds=time.perf_counter() - resumed_s + boundary_s,
            waited_seconds=self.attachment.waits_s[-1],
        )


class _ProgressReporter:
    """Reports progress, but not each of many chunks."""

    def __init__(self) -> None:
        self._reported_s = 0.0

    def __call__(self, progress: FetchProgress) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _PROGRESS_EVERY_S or progress.done_bytes == progress.total_bytes:
            self._reported_s = now_s
            report("progress", done=progress.done_bytes, total=progress.total_bytes, seconds=progress.elapsed_s)


def main() -> None:
    """Trains until standard input ends; recovers first if given the address of a peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--recover-from")
    arguments = parser.parse_args()
    # Two replicas share the machine; more threads would measure their competition and not the recovery.
    torch.set_num_threads(1)
    replica = Replica.build(seed=arguments.seed, width=arguments.width, num_layers=arguments.num_layers)
    step = 0
    if arguments.recover_from is not None:
        before = replica.model.loss(*replica.text.batch(0)).item()
        report("stale", loss=before, digest=f"{state_digest(replica.manager.replica_state()):016x}")
        started_s = time.perf_counter()
        step = replica.manager.recover(arguments.recover_from).step
        report("recovered", step=step, seconds=time.perf_counter() - started_s)
    report("ready", address=replica.address)
    stopped = threading.Event()

    def stop_with_parent() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=stop_with_parent, daemon=True).start()
    while not stopped.is_set():
        replica.train_step(step)
        step += 1
    replica.manager.shutdown()


if __name__ == "__main__":
    main()
