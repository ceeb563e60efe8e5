"""Two ranks load checkpoints that one of them cannot read, or of which one bit was changed; started by `ranks`.

Usage: ``checkpoint_damage.py ROOT REPORTS once|each``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from damage import flip_bit
from programs import fork_writers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ft_transport import CheckpointDamagedError, CheckpointStore, RankFailedError, StoreSettings, TransportError
from ft_transport.checkpoint import settings

NUM_RANKS = 2
CHUNK_BYTES = 4 << 20
OLD, NEW = 1, 2
TIMEOUT = timedelta(seconds=30)


def state(step: int) -> dict[str, Any]:
    """Of one tensor both ranks need all, of another half."""
    value = float(step)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {
        "both": torch.full((2 * CHUNK_BYTES // 4,), value),
        "half": distribute_tensor(torch.full((2 * CHUNK_BYTES // 4,), value), mesh, [Shard(0)], src_data_rank=None),
        "everywhere": distribute_tensor(torch.full((9,), value), mesh, [Replicate()], src_data_rank=None),
        "step": step,
    }


def values_of(into: dict[str, Any]) -> list[float]:
    tensors = [each.to_local() if isinstance(each, DTensor) else each for each in into.values() if not _is_int(each)]
    return torch.cat([tensor.flatten() for tensor in tensors]).unique().tolist()


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def attempt(store: CheckpointStore, step: int) -> dict[str, Any]:
    into = state(-1)
    error: TransportError | None = None
    try:
        store.load(step, into=into)
    except TransportError as raised:
        error = raised
    is_touched = bool(getattr(error, "destination_touched", False))
    return {
        "kind": type(error).__name__,
        "error": str(error),
        "files": error.files if isinstance(error, CheckpointDamagedError) else (),
        "is_touched": is_touched,
        "is_poisoned": all(map(math.isnan, values_of(into))),
        "is_unchanged": values_of(into) == [-1],
    }


@contextlib.contextmanager
def failing(number: int, num_times: int) -> Iterator[None]:
    """On the second rank, what is read of the newest checkpoint's data fails."""
    real: Callable[..., int] = os.preadv
    left = num_times * dist.get_rank()

    def preadv(descriptor: int, *args: Any) -> int:
        nonlocal left
        if left > 0 and f"step-{NEW}/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            left -= 1
            raise OSError(number, os.strerror(number))
        return real(descriptor, *args)

    with patch.object(os, "preadv", preadv):
        yield


def newest_good(store: CheckpointStore, *keys: str) -> list[Any]:
    """Loads into all of the state, or into what is at these keys."""
    into = {key: value for key, value in state(-1).items() if not keys or key in keys}
    try:
        loaded = store.load_newest_good(into=into)
    except RankFailedError as error:
        return [type(error).__name__, error.errno, error.rank]
    assert loaded is not None
    return [loaded.step, loaded.state["step"], values_of(into)]


def main() -> None:
    root, reports, read = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    fork_writers()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    report: list[dict[str, Any]] = []
    with (
        patch.object(settings, "_RETRY_S", 0.3),
        CheckpointStore(root, settings=StoreSettings(timeout=TIMEOUT, read=read)) as store,  # type: ignore[arg-type]
    ):
        for step in (OLD, NEW):
            store.save(step, state(step), wait=True)
        directory = root / f"step-{NEW}"
        for path in sorted(directory.glob("*.distcp")):
            for at in range(CHUNK_BYTES // 2, path.stat().st_size, CHUNK_BYTES):
                if not rank:
                    flip_bit(path, at)
                dist.barrier()
                loaded = attempt(store, NEW)
                verified: tuple[str, ...] = ()
                try:
                    store.verify(NEW)
                except CheckpointDamagedError as error:
                    verified = error.files
                good = newest_good(store)
                report.append({"file": path.name, "at": at, **loaded, "verified": verified, "good": good})
                dist.barrier()
                if not rank:
                    flip_bit(path, at)
                dist.barrier()
        # Nothing of all this is left behind, in the files or in the store.
        into = state(-1)
        with contextlib.suppress(CheckpointDamagedError):
            store.load(into=into)
        unreadable = {}
        for name, number, num_times in (
            ("once", errno.EINTR, 1),
            ("always", errno.ESTALE, 1 << 30),
            ("broken disk", errno.EIO, 1 << 30),
        ):
            with failing(number, num_times):
                unreadable[name] = newest_good(store)
        report.append({"whole_again": values_of(into), "unreadable": unreadable})
    (reports / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
