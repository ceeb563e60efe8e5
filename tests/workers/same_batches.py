"""Trains on `ElasticBatches` with replicas that are killed, and without: the same batches and losses (by hand).

``same_batches.py --kills 40 --seed 1`` compares every step: its samples must be equal, and each once in an epoch.
Prints how far losses and weights differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import same_batches_replica
from programs import Program
from quorum_threads import lighthouse

LONG_S = 120.0


@dataclass
class Run:
    """The notes of all replicas of a run."""

    samples: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    num_replicas: dict[int, int] = field(default_factory=dict)
    num_dropped: int = 0
    weights: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, directory: Path) -> Run:
        run = cls()
        drawn: dict[tuple[int, int, int], dict[str, Any]] = {}
        for path in sorted(directory.glob("*.txt")):
            # A kill may have cut off the last line.
            for note in (json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")):
                if "drawn" in note and note["place"] is not None:
                    earlier = drawn.setdefault((note["drawn"], note["num_replicas"], note["place"]), note)
                    assert earlier["samples"] == note["samples"], "the samples follow from step and place"
                elif "committed" in note:
                    known = run.num_replicas.setdefault(note["committed"], note["num_replicas"])
                    assert known == note["num_replicas"], "a step is committed once"
                elif "done" in note:
                    run.num_dropped += note["done"]
                    run.weights = run.weights or note["weights"]
                    assert run.weights == note["weights"], "all replicas end with the same weights"
        for step, num_replicas in run.num_replicas.items():
            parts = [drawn[step, num_replicas, place] for place in range(num_replicas)]
            run.samples[step] = sorted(index for part in parts for index in part["samples"])
            run.losses[step] = sum(part["loss"] for part in parts) / same_batches_replica.NUM_MICROBATCHES
        return run


def train(directory: Path, names: str, num_steps: int, kills: int, chosen: random.Random) -> Run:
    directory.mkdir()
    running: dict[str, Any] = {}
    with lighthouse() as address, (directory / "log").open("w") as log:

        def start(name: str) -> None:
            running[name] = Program(
                [sys.executable, same_batches_replica.__file__, str(directory), name, str(num_steps)],
                env={**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"},
                stderr=log,
            )

        def newest() -> int:
            lines = [path.read_text().splitlines() for path in directory.glob("*.txt")]
            last = [each[-2:] for each in lines if each]
            found = [json.loads(line).get("drawn", -1) for each in last for line in each[:1]]
            return max(found, default=-1)

        try:
            for name in names:
                start(name)
            for number in range(kills):
                due = (number + 1) * num_steps // (kills + 2)
                deadline_s = time.monotonic() + LONG_S
                while newest() < due:
                    assert time.monotonic() < deadline_s, f"the run does not reach step {due}"
                    time.sleep(0.01)
                time.sleep(chosen.uniform(0, 0.05))
                victim = chosen.choice(names)
                running[victim].kill()
                running[victim].wait()
                start(victim)
            for process in running.values():
                assert process.wait(LONG_S) == 0, (directory / "log").read_text()[-3000:]
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return Run.of(directory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="path of an SVG file to write")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        alone = train(Path(directory, "alone"), "a", options.steps, 0, chosen)
        names = "abcdefgh"[: options.replicas]
        killed = train(Path(directory, "killed"), names, options.steps, options.kills, chosen)
    assert alone.samples == killed.samples, "every step has the same samples"
    assert len(alone.samples) == options.steps
    epoch = same_batches_replica.NUM_SAMPLES
    order = [index for step in range(options.steps) for index in alone.samples[step]]
    whole = len(order) // epoch
    counts = [order.count(index) for index in range(0, epoch, 97)]
    assert all(whole <= count <= whole + 1 for count in counts)
    apart = max(abs(alone.losses[step] - killed.losses[step]) / alone.losses[step] for step in range(options.steps))
    weights = max(abs(one - other) for one, other in zip(alone.weights, killed.weights, strict=True))
    largest = max(map(abs, alone.weights))
    sizes = {size: list(killed.num_replicas.values()).count(size) for size in sorted({*killed.num_replicas.values()})}
    print(
        f"{options.steps} steps, {options.kills} kills, {killed.num_dropped} microbatches dropped, steps by number of "
        f"replicas {sizes}: the same samples in every step; losses at most {apart:.1e} apart (relative), from "
        f"{alone.losses[0]:.3f} to {alone.losses[options.steps - 1]:.3f}; weights at most {weights / largest:.1e} of "
        "the largest"
    )
    if options.picture:
        title = f"loss of {options.steps} steps"
        labels = ("one replica, no failure", f"{options.replicas} replicas, {options.kills} kills")
        Path(options.picture).write_text(picture(title, labels, (alone, killed)))


def picture(title: str, labels: tuple[str, str], runs: tuple[Run, Run]) -> str:
    """Two curves of losses, each point the mean of some steps, and the steps with fewer replicas."""
    width, height, every = 720, 240, 10
    num_steps = len(runs[0].losses)
    most = max(runs[0].losses.values())

    def points(run: Run) -> str:
        means = [
            statistics.fmean(run.losses[step] for step in range(start, min(start + every, num_steps)))
            for start in range(0, num_steps, every)
        ]
        return " ".join(
            f"{40 + (width - 50) * index / (len(means) - 1):.1f},{height - 20 - (height - 60) * mean / most:.1f}"
            for index, mean in enumerate(means)
        )

    full = max(runs[1].num_replicas.values())
    short = [step for step, number in runs[1].num_replicas.items() if number < full]
    bars = [
        f'<rect x="{40 + (width - 50) * step / num_steps:.1f}" y="{height - 12}" width="1" height="8"/>'
        for step in short
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{title}">\n<style>text{{font:13px system-ui,sans-serif;fill:#57606a}}'
        "@media(prefers-color-scheme:dark){text{fill:#9da7b1}}</style>\n"
        f'<text x="0" y="16">{title}</text>\n'
        f'<text x="200" y="16">▬ {labels[0]}</text>\n<text x="380" y="16" style="fill:#3b7dd8">— {labels[1]}</text>\n'
        f'<text x="560" y="16" style="fill:#d1603d">▮ fewer replicas</text>\n'
        f'<polyline fill="none" stroke="#c4ccd4" stroke-width="7" points="{points(runs[0])}"/>\n'
        f'<polyline fill="none" stroke="#3b7dd8" stroke-width="1.5" points="{points(runs[1])}"/>\n'
        f'<g fill="#d1603d">{"".join(bars)}</g>\n</svg>\n'
    )


if __name__ == "__main__":
    main()
