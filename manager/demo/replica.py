"""One replica of the demo, a process of its own. It reports to its parent in lines of JSON on standard output."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pydoc_data.topics import topics
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from ft_transport import HTTPTransport, TransportSettings, state_digest
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from ft_transport.telemetry.record import Record
from manager import Manager, ManagerConfig

TIMEOUT: Final = timedelta(seconds=30)
HEARTBEAT_TIMEOUT: Final = timedelta(seconds=1)
NAMES: Final = ("A", "B", "C")
CONTEXT: Final = 96
BATCH: Final = 8


@dataclass(frozen=True, slots=True)
class Text:
    """The corpus as token ids, ``int64 [num_tokens]``, and how many distinct tokens there are."""

    tokens: torch.Tensor
    vocabulary: int

    @classmethod
    def from_python_documentation(cls) -> Text:
        """Return the help topics of the running Python: half a megabyte of English."""
        text = "\n".join(topics[name] for name in sorted(topics))
        alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
        return cls(torch.tensor([alphabet[character] for character in text]), len(alphabet))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's batch, the same in every process: inputs and targets, each ``int64 [BATCH, CONTEXT]``."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([self.tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


class LanguageModel(nn.Module):
    """A transformer decoder with dropout, so that the random generator's state matters too.

    Args:
        vocabulary: Number of distinct tokens.
        width: Size of the hidden state; a multiple of 64.
        num_layers: Transformer layers.
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
        # Tied weights, as in most language models; a recovered replica must have them too.
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats per character; a scalar."""
        hidden = self.tokens(inputs) + self.positions.weight
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        logits = cast(torch.Tensor, self.head(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def report(event: str, **fields: object) -> None:
    """Send one event to the parent."""
    print(json.dumps({"event": event, **fields}), flush=True)


class RecoveryReporter(logging.Handler):
    """Reports each recovery that the manager logs to the parent."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record if it carries a recovery."""
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
    """The parent's requests on standard input: the step at which to stand still, and, by its end, to exit."""

    def __init__(self) -> None:
        self.has_left = SafeEvent()
        self._still_at: int | None = None
        SafeThread(target=self._listen, daemon=True).start()

    def wants_stillness(self, step: int) -> bool:
        """Return whether this is the last step."""
        return self._still_at is not None and step >= self._still_at

    def _listen(self) -> None:
        for line in sys.stdin:
            self._still_at = int(line)
        self.has_left.set()


class Replica:
    """The training objects of one replica: weights of its own until the quorum has made all equal.

    If torch.distributed runs, this is one rank of the replica, and FSDP2 divides the model among its ranks.

    Args:
        name: One of ``NAMES``.
        width: Hidden size of the model.
        num_layers: Number of its layers.
    """

    def __init__(self, name: str, *, width: int, num_layers: int) -> None:
        self._index = NAMES.index(name)
        torch.manual_seed(self._index)
        self._text = Text.from_python_documentation()
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
        """Make one step, and report its loss and the digest of the state that it began with."""
        manager = self.manager
        started_s = time.perf_counter()
        manager.start_quorum()
        step = manager.current_step()
        report("boundary", step=step, digest=f"{state_digest(manager.replica_state()):016x}")
        self._optimizer.zero_grad()
        # Each replica, and each rank of it, has batches of its own.
        num_before = (len(NAMES) * step + self._index) * self._num_ranks + self._rank
        loss = self._model.loss(*self._text.batch(num_before))
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
    """Train until standard input ends, or names a step to stand still at."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    arguments = parser.parse_args()
    # The reports contain all errors.
    logger = logging.getLogger("manager")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(RecoveryReporter())
    # The replicas share the machine; more threads would measure their competition.
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    replica = Replica(arguments.name, width=arguments.width, num_layers=arguments.num_layers)
    parent = Parent()
    while not parent.has_left.is_set():
        if parent.wants_stillness(replica.manager.current_step()):
            report("still")
            parent.has_left.wait()
        else:
            replica.train_step()
    replica.manager.shutdown()
