"""Training: what a copy of the state costs the steps of a model."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.gpu.copying import ALONE, KEEP, PERIOD, SAVE, SNAPSHOT, Copying, installed_ways
from benchmarks.gpu.model import DeviceModel, device_name, failure_notes, noting_failure, synchronize
from benchmarks.machine import Watch
from benchmarks.options import Options
from benchmarks.report import Group, Quantity, Verdict
from benchmarks.states import num_bytes_of
from ft_transport.runtime.threads import SafeExecutor

_STATE_BYTES: Final = 12_000_000_000
_REPEATED: Final = (ALONE, SNAPSHOT, KEEP)
"""The others are measured once: the whole script has eight minutes."""

STEP_TIME: Final = Quantity("a step", "ms")
PAUSE: Final = Quantity("pause", "ms")
COMPLETE: Final = Quantity("until it is complete", "ms")


def measure_training(group: Group, options: Options) -> None:
    """Trains ten steps for each way to copy the state, by turns."""
    training = DeviceModel(_STATE_BYTES)
    num_bytes = num_bytes_of(training.state())
    group.title = f"a model and AdamW, {num_bytes / 1e9:.2f} GB on {device_name()}, a copy every {PERIOD} steps"
    ways = installed_ways()
    failures: dict[str, str] = {}
    with ExitStack() as outer:
        directory = Path(tempfile.mkdtemp(prefix=".gpu-benchmark-", dir=options.directory))
        outer.callback(shutil.rmtree, directory, ignore_errors=True)
        for round_number, variant in options.rounds("gpu training", tuple(ways)):
            if round_number and variant not in _REPEATED:
                continue
            with noting_failure(variant, failures), ExitStack() as stack:
                own = directory / f"{round_number}-{len(group.series)}"
                stack.callback(shutil.rmtree, own, ignore_errors=True)
                copying = ways[variant](training, own, stack)
                copying.every_step(0)
                # The first copy allocates and page-locks its memory.
                begun = copying.begin(0)
                training.step(copying.before_optimizer)
                begun.wait()
                begun.clean_up()
                with Watch([os.getpid()]) as watch:
                    pause_s, complete_s, step_s = _period(training, copying, PERIOD)
                group.add(variant, STEP_TIME, watch.sample(round_number, step_s * 1e3))
                if variant is not ALONE:
                    group.add(variant, PAUSE, watch.sample(round_number, pause_s * 1e3))
                    group.add(variant, COMPLETE, watch.sample(round_number, complete_s * 1e3))
    group.sort(tuple(ways))
    group.notes += failure_notes(failures)
    group.notes.append("pause: the host's time in the calls before forward and before the optimizer's step")
    group.verdicts = [
        Verdict.at_most(
            f"a step, {variant.name} every {PERIOD} steps / alone", group.ratio(variant, ALONE, STEP_TIME), 1.01
        )
        for variant in (SNAPSHOT, KEEP, SAVE)
    ] + [Verdict.at_most("pause of a snapshot, ms", group.figure(SNAPSHOT, PAUSE), 5.0)]


def _period(training: DeviceModel, copying: Copying, first_step: int) -> tuple[float, float, float]:
    """Returns the seconds of the pause, of the copy, and the mean of a step."""
    pause_s = hook_began_s = 0.0

    def before_optimizer() -> None:
        nonlocal hook_began_s
        hook_began_s = time.monotonic()
        copying.before_optimizer()

    def hooks_ended(*_hook_arguments: object) -> None:
        nonlocal pause_s
        pause_s += time.monotonic() - hook_began_s

    # Hooks run in the order of their registration: the manager's own has returned.
    hook = training.optimizer.register_step_pre_hook(hooks_ended)
    with SafeExecutor(1, "gpu-benchmark") as waiting:
        try:
            synchronize()
            began_s = time.monotonic()
            copying.every_step(first_step)
            begun = copying.begin(first_step)
            pause_s += time.monotonic() - began_s
            completed = waiting.submit(lambda: (begun.wait(), time.monotonic())[1])
            training.step(before_optimizer)
            for step in range(first_step + 1, first_step + PERIOD):
                step_began_s = time.monotonic()
                copying.every_step(step)
                pause_s += time.monotonic() - step_began_s
                training.step(before_optimizer)
            synchronize()
            step_s = (time.monotonic() - began_s) / PERIOD
        finally:
            hook.remove()
        complete_s = completed.result() - began_s
    begun.clean_up()
    return pause_s, complete_s, step_s
