"""A trainer that saves to a bucket is killed at any request, again and again, while requests fail (by hand: ``ARGS``).

``bucket_crashes.py --lives 1000 --seed 7``. Each life loads the newest checkpoint, compares it, and saves the next
ones, until it is killed at a random request. No checkpoint that a save has reported may be lost, and none may be
incomplete.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from buckets import BUCKET, LOST, Bucket, served_bucket
from programs import Program
from state_equality import exact

from ft_transport import CheckpointStore, StoreSettings, TransportError

URL = f"s3://{BUCKET}/run"
_FAULTS = ("slow down", *LOST)
_SHARE_OF_FAULTS = 0.03
_MOST_REQUESTS = 90
"""A life that saves three checkpoints has about so many requests."""


def state_of(step: int) -> dict[str, Any]:
    return {
        "frozen": torch.arange(60_000, dtype=torch.float32),
        "trained": torch.full((20_000,), float(step)),
        "step": step,
    }


def train() -> None:
    """One life: it says what it has loaded and saved, one JSON object a line."""
    with CheckpointStore(
        URL, keep=3, settings=StoreSettings(timeout=timedelta(seconds=60), max_failed_saves=1000)
    ) as store:
        loaded = store.load_newest_good()
        step = loaded.step if loaded is not None else 0
        if loaded is not None:
            assert exact(loaded.state) == exact(state_of(step)), f"step {step} differs"
        _say(loaded=step)
        while True:
            step += 1
            try:
                store.save(step, state_of(step), wait=True)
            except (TransportError, OSError) as error:
                _say(failed=f"{type(error).__name__}: {error}")
            else:
                _say(saved=step)


def _say(**content: object) -> None:
    print(json.dumps(content), flush=True)


class Life:
    """A process that is killed at a request; until then, some requests fail."""

    def __init__(self, bucket: Bucket, chosen: random.Random) -> None:
        self._chosen = chosen
        self._left = chosen.randint(1, _MOST_REQUESTS)
        self._last = chosen.choice(LOST)
        self.process = Program(
            [sys.executable, __file__, "--train"],
            env={**os.environ, **bucket.environment(), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        bucket.fault = self._fault

    def said(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        yield from map(json.loads, self.process.stdout)

    def _fault(self, _method: str, _path: str) -> str | None:
        self._left -= 1
        if not self._left:
            self.process.kill()
            return self._last
        return self._chosen.choice(_FAULTS) if self._chosen.random() < _SHARE_OF_FAULTS else None


def run(bucket: Bucket, num_lives: int, seed: int) -> Counter[str]:
    """Run the lives one after the other; return how often each thing happened."""
    chosen = random.Random(seed)
    seen = Counter[str]()
    newest = 0
    for number in range(num_lives):
        life = Life(bucket, chosen)
        for said in life.said():
            seen.update(said.keys())
            if "loaded" in said:
                assert said["loaded"] >= newest, f"life {number} found step {said['loaded']}, {newest} was saved"
            newest = max(newest, said.get("saved", 0), said.get("loaded", 0))
        life.process.stdout.close()  # type: ignore[union-attr]
        status = life.process.wait()
        assert status == -9, f"life {number} ended with {status}"
    bucket.fault = lambda _method, _path: None
    os.environ.update(bucket.environment())
    with CheckpointStore(URL, keep=3) as store:
        steps = store.steps()
        assert steps[-1] >= newest
        for step in steps:
            store.verify(step)
            assert exact(store.load(step).state) == exact(state_of(step))
        names = {path.partition("/")[0] for path in bucket.objects(URL)}
        shared = {path for step in steps for path in _shared(store, step)}
    own = {f"step-{step}" for step in steps} | {path.partition("/")[0] for path in shared} | {"steps.json"}
    assert {name for name in names if not name.startswith(".owner-")} <= own, (names, own)
    seen["left"] = len(steps)
    return seen


def _shared(store: CheckpointStore, step: int) -> list[str]:
    from ft_transport.checkpoint.bucket_files import BucketFiles

    location = store._root.find(step)
    assert location is not None
    return list(BucketFiles(location).read_shared().values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--lives", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.train:
        train()
    else:
        with served_bucket() as served:
            print(dict(run(served, arguments.lives, arguments.seed)))
