"""Keep copies: what copies of kept states in other hosts' memory cost the trainers.

Two ranks train in processes of their own, on two failure domains. A step rests, as that of a trainer whose work is on
a device, and then steps a real optimizer. In every second block of 10 steps, each rank keeps the state of the first
step, and copies that of the other rank over loopback connections meanwhile. The peer keeps states without copies.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.keep import COPY, COST, EVERY, PAUSE, STEP, copy_seconds, share_of_steps
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Channel, Child
from benchmarks.replicas.training import Model, Training
from benchmarks.report import Group, Named, Sample, Verdict
from ft_transport import HTTPTransport, TransportSettings
from manager import Manager

_STATE_BYTES: Final = 500_000_000
_NUM_TENSORS: Final = 300
_NUM_RANKS: Final = 2
_NUM_BLOCKS: Final = 6
"""Pairs of blocks of `EVERY` steps: one that keeps a state, and one that keeps none. A first pair allocates memory."""
_REST_S: Final = 0.2
_ALLOCATING_S: Final = 3.0

COPIED: Final = Named("ft_transport keep_every, copies=2", "ours")
KEPT: Final = Named("ft_transport keep_every", "peer")
_COPIES: Final = {COPIED: 2, KEPT: 1}


@dataclass(frozen=True, slots=True)
class _Trained:
    """The measurements of one rank; durations in seconds."""

    pause_s: float
    step_s: float
    added_s: float
    copy_s: float
    num_copies: int


def _train(channel: Channel, copies: int, model: Model, port: int, rank: int) -> None:
    # The port names the job: no later life finds the kept states of this one.
    os.environ.update(TORCHELASTIC_RUN_ID=str(port), FT_TRANSPORT_ADVERTISE="127.0.0.1")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NUM_RANKS)
    training = Training(model)
    training.optimizer = torch.optim.AdamW(training.trained, lr=1e-3, fused=True)
    training.backward()
    # Between hosts, nobody lends memory.
    transport = HTTPTransport[Any](settings=TransportSettings(same_host=False))
    manager = Manager(checkpoint_transport=transport, keep_every=EVERY, copies=copies, failure_domain=f"host {rank}")
    manager.register("model", training.model)
    manager.register("optimizer", training.optimizer)
    manager.attach(training.optimizer)
    replica = manager._replica
    keeping = replica.keeping
    assert keeping is not None, "the manager has keep_every"
    began = [0.0]
    waited_s: list[float] = []
    training.optimizer.register_step_pre_hook(lambda *_: waited_s.append(time.perf_counter() - began[0]))
    blocks: dict[bool, list[tuple[float, list[float]]]] = {False: [], True: []}
    step = EVERY
    for number in range(_NUM_BLOCKS + 1):
        for keeps in (True, False):
            replica.keeping = keeping if keeps else None
            lost_s: list[float] = []
            dist.barrier()
            start_s = time.perf_counter()
            for step in range(step, step + EVERY):  # noqa: B020 - it goes on counting
                boundary_s = time.perf_counter()
                manager.start_step(step)
                boundary_s = time.perf_counter() - boundary_s
                time.sleep(_REST_S)
                began[0] = time.perf_counter()
                training.optimizer.step()
                lost_s.append(boundary_s + waited_s[-1])
            step += 1
            if number:
                blocks[keeps].append((time.perf_counter() - start_s, lost_s))
            elif keeps:
                time.sleep(_ALLOCATING_S)
    pause_s = statistics.median(lost[0] - statistics.median(lost) for _, lost in blocks[True])
    added = [kept - plain for (kept, _), (plain, _) in zip(blocks[True], blocks[False], strict=True)]
    step_s = statistics.median(seconds for seconds, _ in blocks[False]) / EVERY
    copy_s = min(copy_seconds(training, is_fresh=False) for _ in range(3))
    num_copies = len(keeping.status().copied_ranks)
    channel.say(_Trained(pause_s, step_s, statistics.median(added) - pause_s, copy_s, num_copies))
    channel.wait_for_end()
    replica.keeping = keeping
    manager.shutdown()


def run(options: Options) -> Iterator[Group]:
    """Measures ranks that keep their states with copies, and without, by turns."""
    num_items = int(_STATE_BYTES * options.scale) // (12 * _NUM_TENSORS)
    model = Model(name="copies", num_tensors=_NUM_TENSORS, num_items=num_items, is_foreach=None)
    group = Group("keep-copies", "2ranks", f"{_NUM_RANKS} ranks of {model.state_bytes / 1e9:.2f} GB, {model.title}")
    for round_number, variant in options.rounds("keep-copies", (COPIED, KEPT)):
        for trained in _life(_COPIES[variant], model):
            if variant is COPIED and not trained.num_copies:
                raise RuntimeError("expected copies of the other rank's state, got none")
            for quantity, measured_s in ((PAUSE, trained.pause_s), (STEP, trained.step_s), (COST, trained.added_s)):
                group.add(variant, quantity, Sample(round_number, measured_s * 1e3, None))
            group.add(COPY, PAUSE, Sample(round_number, trained.copy_s * 1e3, None))
    group.sort((COPIED, KEPT, COPY))
    group.notes.append(
        f"a step rests for {_REST_S * 1e3:.0f} ms and steps an optimizer on the CPU; both ranks share the cores"
    )
    group.verdicts = judge(group)
    yield group


def _life(copies: int, model: Model) -> list[_Trained]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Child(_train, copies, model, store.port, rank) for rank in range(_NUM_RANKS)]
    try:
        return [rank.receive() for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()


def judge(group: Group) -> list[Verdict]:
    """The pause against a copy in memory, the rest against the steps."""
    return [
        Verdict.at_most("pause of a kept step / memmove of the state", group.ratio(COPIED, COPY, PAUSE), 1.05),
        Verdict.at_most("time added beyond the pause / 10 steps", share_of_steps(group, COPIED), 0.01),
    ]


BENCHMARK: Final = Benchmark(
    name="keep-copies",
    question="What do copies of kept states in other hosts' memory cost?",
    run=run,
    default=Size(scale=0.5, num_samples=1),
    misses={
        "beyond the pause": "Both ranks run on the same two cores, and each of them sends, receives and digests a "
        "state there in every second block; single rounds are from -0.01 to 0.03.",
    },
)
