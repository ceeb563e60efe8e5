"""All ranks set one directory up at once and write a file of their own into it; started by `ranks`.

Usage: ``checkpoint_race.py DIRECTORY NUM_ITERATIONS``. Each iteration begins anew over what the one before has left:
once through a store that clears, once by the pattern of openpi before its PR 969, in which each rank clears and makes
the directory by itself. Each rank leaves a report in ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ft_transport import CheckpointStore


def write(directory: Path, iteration: int) -> None:
    directory.mkdir(exist_ok=True)
    (directory / _name(dist.get_rank(), iteration)).write_text(str(iteration))


def _name(rank: int, iteration: int) -> str:
    """As a save that was interrupted leaves them; other files are another program's, and are not cleared."""
    return f"__{rank}_{iteration}.distcp"


@contextmanager
def guarded(root: Path, iteration: int) -> Iterator[None]:
    # What is cleared are checkpoints; so the file is put where the next one clears, in a directory of such a name.
    with CheckpointStore(root, existing="clear", start_writers=False):
        write(root / "step-1", iteration)
        yield


@contextmanager
def unguarded(root: Path, iteration: int) -> Iterator[None]:
    root.mkdir(exist_ok=True)
    directory = root / "step-1"
    if directory.exists():
        shutil.rmtree(directory)
    write(directory, iteration)
    yield


def race(root: Path, num_iterations: int, set_up: Callable[..., Any]) -> dict[str, Any]:
    errors, lost, left = [], 0, 0
    for iteration in range(num_iterations):
        dist.barrier()
        try:
            with set_up(root, iteration):
                pass
        except Exception as error:
            errors.append(f"iteration {iteration}: {type(error).__name__}: {error}")
        dist.barrier()
        names = {path.name for path in (root / "step-1").glob("*")}
        expected = {_name(rank, iteration) for rank in range(dist.get_world_size())}
        lost += len(expected - names)
        left += len(names - expected)
    return {"errors": errors, "num_lost": lost, "num_left": left}


def main() -> None:
    directory, num_iterations = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report: dict[str, Any] = {}
    for set_up in (unguarded, guarded):
        started_s = time.monotonic()
        report[set_up.__name__] = race(directory / set_up.__name__, num_iterations, set_up)
        report[set_up.__name__]["took_s"] = time.monotonic() - started_s
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
