"""Publishing: how long until so many engines use a new adapter.

The engines are stand-ins (``tests/support/engine_servers.py``) that take a second for each load, in a process of their
own. Told one after the other, 64 of them would take 64 times as long as one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch

from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Quantity, Role, Sample, Verdict
from ft_transport import LoRAAdapter, Publisher, VLLMEngine

_SERVERS: Final = Path(__file__).resolve().parent.parent / "tests" / "support" / "engine_servers.py"
_LOAD_S: Final = 1.0
_TIMEOUT: Final = timedelta(seconds=60)
_CONFIRMED: Final = Quantity("until all have confirmed", "s")


@dataclass(frozen=True, slots=True)
class FleetVariant:
    """So many engines that are told of one version."""

    num_engines: int
    role: Role = "ours"

    @property
    def name(self) -> str:
        return f"{self.num_engines} engines"


_FLEETS: Final = tuple(FleetVariant(number) for number in (1, 4, 16, 64))


def run(options: Options) -> Iterator[Group]:
    """Measures each number of engines in turn: the time of the slowest engine, from when it was told."""
    group = Group("publishing", "adapter", f"stand-ins of vLLM that load for {_LOAD_S:.0f} s")
    adapter = LoRAAdapter(
        {"base_model.model.q.lora_A.weight": torch.rand(8, 512)}, {"r": 8, "lora_alpha": 16, "target_modules": ["q"]}
    )
    command = [sys.executable, str(_SERVERS), str(sum(fleet.num_engines for fleet in _FLEETS)), str(_LOAD_S)]
    with ExitStack() as stack:
        servers = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert servers.stdin is not None
        assert servers.stdout is not None
        stack.callback(servers.stdin.close)
        urls = iter(json.loads(servers.stdout.readline()))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        publishers = {}
        for fleet in _FLEETS:
            engines = [VLLMEngine(next(urls)) for _ in range(fleet.num_engines)]
            publishers[fleet] = Publisher(engines, directory / str(fleet.num_engines), engine_timeout=_TIMEOUT)
            stack.callback(publishers[fleet].close)
            publishers[fleet].publish(0, adapter).result()  # The first makes connections.
        for round_number, fleet in options.rounds("publishing", _FLEETS):
            handle = publishers[fleet].publish(round_number + 1, adapter)
            started_s = time.perf_counter()
            handle.result()
            group.add(fleet, _CONFIRMED, Sample(round_number, time.perf_counter() - started_s))
    group.sort(_FLEETS)
    most, one = _FLEETS[-1], _FLEETS[0]
    group.verdicts = [Verdict.at_most(f"{most.name} / 1 engine", group.ratio(most, one, _CONFIRMED), 1.3)]
    yield group


BENCHMARK: Final = Benchmark(
    name="publishing",
    question="How long until all engines have a new adapter?",
    run=run,
    default=Size(scale=1.0, num_samples=3),
)
