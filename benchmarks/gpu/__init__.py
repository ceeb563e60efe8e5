"""GPU: what fault tolerance costs a model on a CUDA device. Without one, states are small, on the CPU.

`training` steps a model, and takes a copy of its state in every tenth step. `moving` fetches a state from the memory of
the device into the device's memory of another process. `restoring` kills a process that has kept a state, and gives
that state to a new process. `joining` lets a replica join another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from benchmarks.gpu.joining import measure_joining
from benchmarks.gpu.moving import measure_moving
from benchmarks.gpu.restoring import measure_restoring
from benchmarks.gpu.training import measure_training
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group

_RUNS: Final[Mapping[str, Callable[[Group, Options], None]]] = {
    "training": measure_training,
    "moving": measure_moving,
    "restoring": measure_restoring,
    "joining": measure_joining,
}


def run(options: Options) -> Iterator[Group]:
    """Measures one after the other."""
    for name in options.states:
        group = Group("gpu", name, "")
        _RUNS[name](group, options)
        yield group


BENCHMARK: Final = Benchmark(
    name="gpu",
    question="What does it cost a model on a GPU?",
    run=run,
    states=tuple(_RUNS),
    default=Size(scale=1.0, num_samples=2),
    misses={
        "pause of a snapshot": "Measured when the host still waited for the copy over PCIe before an optimizer step.",
        "save every": "The writes to disk go on for longer than the ten steps, and use the host's memory and cores.",
    },
)
