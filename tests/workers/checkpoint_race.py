"""Ranks that set one directory up at once, and two groups that want the same one; started by `ranks.run_scenarios`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from checkpoint_ranks import Ranks, is_loaded, raised, state_of
from programs import fork_writers
from ranks import report_scenarios

from ft_transport import CheckpointStore
from ft_transport.checkpoint import inventory

_NUM_ITERATIONS = 20
_NUM_GUARDED = 6
"""Each makes a store on every rank."""


def write(directory: Path, iteration: int) -> None:
    directory.mkdir(exist_ok=True)
    (directory / _name(dist.get_rank(), iteration)).write_text(str(iteration))


def _name(rank: int, iteration: int) -> str:
    """As a save that was interrupted leaves them; other files are another program's, and are not cleared."""
    return f"__{rank}_{iteration}.distcp"


@contextmanager
def guarded(root: Path, iteration: int) -> Iterator[None]:
    # What is cleared are checkpoints; so the file is put where the next one clears, in a directory of such a name.
    with CheckpointStore(root, existing="clear"):
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


def _race(root: Path, set_up: Callable[..., Any], num_iterations: int) -> dict[str, Any]:
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


def race(ranks: Ranks) -> dict[str, Any]:
    """All ranks write a file of their own into one directory, which each iteration begins anew.

    Once through a store that clears, once by the pattern of openpi before its PR 969, in which each rank clears and
    makes the directory by itself.
    """
    return {
        each.__name__: _race(ranks.root.with_name(each.__name__), each, num_iterations)
        for each, num_iterations in ((unguarded, _NUM_ITERATIONS), (guarded, _NUM_GUARDED))
    }


def two_groups(ranks: Ranks) -> dict[str, Any]:
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    is_first = ranks.rank < 2
    group = first if is_first else second
    report: dict[str, Any] = {}
    store = ranks.store(process_group=first) if is_first else None
    dist.barrier()
    if store is None:
        with patch.object(inventory, "_CLAIM_S", 0.5):
            report["error"] = raised(lambda: ranks.store(process_group=second))
        # Who only reads is in nobody's way.
        with ranks.store(process_group=second, read_only=True) as reading:
            report["steps_seen"] = list(reading.steps())
    dist.barrier()
    if store is not None:
        store.save(1, state_of(1, dist.get_rank(group)), wait=True)
        report["is_loaded"] = is_loaded(store, 1, dist.get_rank(group))
        store.close()
    dist.barrier()
    if store is None:
        with ranks.store(process_group=second) as store_after:
            store_after.save(2, state_of(2, dist.get_rank(group)), wait=True)
            report["is_loaded"] = is_loaded(store_after, 2, dist.get_rank(group))
            report["steps_after"] = list(store_after.steps())
    return report


if __name__ == "__main__":
    fork_writers()
    report_scenarios((race, two_groups), Ranks)
