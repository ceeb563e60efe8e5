"""One replica of the demo: the program of its process (`main`), and a handle to that process (`ReplicaProcess`).

The process reports events to the demo as lines of JSON on stdout, and reads requests of the demo from stdin.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pydoc_data.topics import topics
from typing import IO, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from ft_transport import HTTPTransport, TransportSettings, state_digest
from ft_transport.runtime.children import child_command, child_environment
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from ft_transport.telemetry.record import Record
from manager import Manager, ManagerConfig

TIMEOUT: Final = timedelta(seconds=30)
HEARTBEAT_TIMEOUT: Final = timedelta(seconds=1)
NAMES: Final = ("A", "B", "C")
CONTEXT: Final = 96
BATCH: Final = 8
ENDED: Final = "ended"
"""Name of the event of a process that has closed its stdout, because it has exited."""


class Text:
    """The text to train on: the help topics of Python, half a megabyte of English.

    Attributes:
        tokens: The token of each character, ``int64 [num_tokens]``.
        vocabulary: Number of distinct tokens.
    """

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
        self.tokens = torch.tensor([alphabet[character] for character in text])
        self.vocabulary = len(alphabet)

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a batch, each ``int64 [BATCH, CONTEXT]``, the same in every process."""
        generator = torch.Generator().manual_seed(index)
        starts = torch.randint(len(self.tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([self.tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


class LanguageModel(nn.Module):
    """A transformer decoder with dropout, whose results depend on the random generator's state.

    Args:
        vocabulary: Number of distinct tokens.
        width: Size of the hidden state; a multiple of 64.
        num_layers: Number of transformer layers.
    """

    def __init__(self, vocabulary: int, *, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Tied weights, as in most language models, which a recovered replica must have, too.
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats per character, as a scalar tensor."""
        hidden = self.tokens(inputs) + self.positions.weight
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        logits = cast(torch.Tensor, self.head(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def report(event: str, **fields: object) -> None:
    """Send one event to the parent process."""
    print(json.dumps({"event": event, **fields}), flush=True)


class RecoveryReporter(logging.Handler):
    """A log handler that reports each recovery of the manager to the parent process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report a log record that describes a recovery."""
        recovery = getattr(record, "recovery", None)
        if isinstance(recovery, dict):
            report("healed", **recovery, seconds=getattr(record, "seconds", 0.0))


def _report_record(record: Record) -> None:
    report(
        "recorded",
        operation=record.kind,
        outcome=record.outcome,
        received_bytes=sum(transfer.num_bytes for transfer in record.transfers),
    )


class Parent:
    """Reads requests from stdin: each line is a step at which to stop training; the end of stdin means to exit."""

    def __init__(self) -> None:
        self.has_left = SafeEvent()
        self._stop_at: int | None = None
        SafeThread(target=self._listen, daemon=True).start()

    def requests_stop_at(self, step: int) -> bool:
        """Return whether the parent process has requested to stop training at this or an earlier step."""
        return self._stop_at is not None and step >= self._stop_at

    def _listen(self) -> None:
        for line in sys.stdin:
            self._stop_at = int(line)
        self.has_left.set()


class Replica:
    """The training objects of one replica, whose weights differ from other replicas' until the first quorum.

    If torch.distributed is initialized, this is one rank of the replica, and FSDP2 divides the model among the ranks.

    Args:
        name: Name of the replica, one of ``NAMES``.
        width: Hidden size of the model.
        num_layers: Number of layers of the model.
    """

    def __init__(self, name: str, *, width: int, num_layers: int) -> None:
        self._index = NAMES.index(name)
        torch.manual_seed(self._index)
        self._text = Text()
        self._model = LanguageModel(self._text.vocabulary, width=width, num_layers=num_layers)
        self._rank, self._num_ranks = 0, 1
        if dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
            for layer in self._model.layers.layers:
                fully_shard(layer)
            fully_shard(self._model)
            register_fsdp_forward_method(self._model, "loss")
        self._optimizer = AdamW(self._model.parameters(), lr=1e-3)
        self._scheduler = CosineAnnealingLR(self._optimizer, T_max=1000)
        settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
        config = ManagerConfig(
            replica_id=name, timeout=TIMEOUT, quorum_timeout=2 * TIMEOUT, heartbeat_timeout=HEARTBEAT_TIMEOUT
        )
        transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=settings)
        transport.recorder.subscribe(_report_record)
        report("serving", metrics=transport.metadata().removesuffix("/checkpoint/") + "/metrics")
        self.manager = Manager(config=config, checkpoint_transport=transport)
        self.manager.register("model", self._model)
        self.manager.register("optimizer", self._optimizer)
        self.manager.register("scheduler", self._scheduler)
        self.manager.attach(self._optimizer)

    def train_step(self) -> None:
        """Make one step. Report the digest of the state before the step, and the step's loss and outcome."""
        manager = self.manager
        started_s = time.perf_counter()
        manager.start_quorum()
        step = manager.current_step()
        report("boundary", step=step, digest=f"{state_digest(manager.replica_state()):016x}")
        self._optimizer.zero_grad()
        # Each rank of each replica has other batches.
        batch = (len(NAMES) * step + self._index) * self._num_ranks + self._rank
        loss = self._model.loss(*self._text.batch(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        manager.average_gradients(self._model)
        committed = manager.should_commit()
        if committed:
            self._optimizer.step()
            self._scheduler.step()
        report(
            "step",
            step=step,
            loss=loss.item(),
            committed=committed,
            participants=manager.num_participants(),
            seconds=time.perf_counter() - started_s,
            error=str(manager.errored() or ""),
        )


def main() -> None:
    """Train until stdin ends, or up to a step that a line of stdin names. Then wait for the end of stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    arguments = parser.parse_args()
    # Errors are not logged, because the reports contain them.
    logger = logging.getLogger("manager")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(RecoveryReporter())
    # The replicas share a machine: with more threads, they would only slow each other down.
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    replica = Replica(arguments.name, width=arguments.width, num_layers=arguments.num_layers)
    parent = Parent()
    while not parent.has_left.is_set():
        if parent.requests_stop_at(replica.manager.current_step()):
            report("still")
            parent.has_left.wait()
        else:
            replica.train_step()
    replica.manager.shutdown()


class Event(NamedTuple):
    """One line that a replica's process has reported, and the time of arrival by the monotonic clock."""

    sender: ReplicaProcess
    name: str
    fields: dict[str, Any]
    received_s: float


@dataclass(slots=True)
class ReplicaProcess:
    """A process of a replica in the demo. A restart of the replica makes another object.

    Attributes:
        name: Name of the replica.
        group_rank: Rank of the process within the replica.
        process: The process.
        digests: Digest of the state at each step boundary, by step.
        step_seconds: Duration of each step in seconds, by step.
        metrics: URL of the process's metrics; empty until the process has reported it.
        committed_s: Time of the report of each committed step, by the monotonic clock.
        num_recoveries: Number of states that the process has received and loaded.
        received_bytes: Bytes that the process has received in finished transfers.
        is_still: Whether the process has stopped training, on request.
    """

    name: str
    group_rank: int
    process: subprocess.Popen[str]
    digests: dict[int, str] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)
    metrics: str = ""
    committed_s: list[float] = field(default_factory=list)
    num_recoveries: int = 0
    received_bytes: int = 0
    is_still: bool = False

    @classmethod
    def start(
        cls,
        name: str,
        events: queue.SimpleQueue[Event],
        arguments: list[str],
        *,
        lighthouse: str,
        rank: int = 0,
        num_ranks: int = 1,
        store_port: int = 0,
    ) -> ReplicaProcess:
        """Start a process, and a thread that puts the process's events into the queue.

        Args:
            name: Name of the replica.
            events: The queue for the events.
            arguments: Command-line arguments with the size of the model.
            lighthouse: Address of the Lighthouse.
            rank: Rank of the process within the replica.
            num_ranks: Number of ranks of the replica.
            store_port: Port of the store through which several ranks meet.
        """
        # As torchrun sets them (torch/distributed/run.py). Rank 0 does not serve the store, because the demo does.
        torchrun = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        process = subprocess.Popen(
            child_command("manager.demo.replica", "main", name, *arguments),
            env={
                **child_environment(),
                **(torchrun if num_ranks > 1 else {}),
                "TORCHFT_LIGHTHOUSE": lighthouse,
                "RUST_LOG": "error",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "stdout is a pipe"
        started = cls(name, rank, process)
        SafeThread(target=_read_events, args=(started, process.stdout, events), daemon=True).start()
        return started

    def record(self, event: Event) -> None:
        """Update the attributes from one event of this process."""
        fields = event.fields
        match event.name:
            case "serving":
                self.metrics = fields["metrics"]
            case "boundary":
                self.digests[fields["step"]] = fields["digest"]
            case "step":
                self.step_seconds[fields["step"]] = fields["seconds"]
                if fields["committed"]:
                    self.committed_s.append(event.received_s)
            case "healed":
                self.num_recoveries += 1
            case "recorded":
                self.received_bytes += fields["received_bytes"]
            case "still":
                self.is_still = True
            case _:
                pass

    def stand_still(self, step: int) -> None:
        """Ask the process to stop training at this step."""
        assert self.process.stdin is not None, "stdin is a pipe"
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Ask the process to exit after its present step. `kill` ends a process that does not exit."""
        assert self.process.stdin is not None, "stdin is a pipe"
        with suppress(OSError):  # the process has exited already
            self.process.stdin.close()


def _read_events(sender: ReplicaProcess, lines: IO[str], events: queue.SimpleQueue[Event]) -> None:
    with lines:
        for line in lines:
            with suppress(json.JSONDecodeError):  # the last line of a killed process may be incomplete
                fields = json.loads(line)
                events.put(Event(sender, fields.pop("event"), fields, time.monotonic()))
    events.put(Event(sender, ENDED, {}, time.monotonic()))
