"""Two ranks load checkpoints of which one of them cannot read its part; started by `ranks`.

Usage: ``unreadable_checkpoints.py ROOT REPORTS``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from programs import fork_writers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ft_transport import CheckpointStore, RankFailedError, StoreSettings
from ft_transport.checkpoint import settings as settings_module

OLD, NEW = 1, 2
_NUM_ELEMENTS = 4 << 20


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {"w": distribute_tensor(torch.full((_NUM_ELEMENTS,), float(step)), mesh, [Shard(0)], src_data_rank=None)}


@contextmanager
def failing(number: int, num_times: int, *, rank: int) -> Iterator[None]:
    """On one rank, what is read of the newest checkpoint's data fails."""
    real: Callable[..., int] = os.preadv
    left = num_times if dist.get_rank() == rank else 0

    def preadv(descriptor: int, *args: Any) -> int:
        nonlocal left
        if left > 0 and f"step-{NEW}/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            left -= 1
            raise OSError(number, os.strerror(number))
        return real(descriptor, *args)

    os.preadv = preadv  # type: ignore[assignment]
    try:
        yield
    finally:
        os.preadv = real


def load(store: CheckpointStore) -> list[Any]:
    into = state(-1)
    try:
        loaded = store.load_newest_good(into=into)
    except RankFailedError as error:
        return [type(error).__name__, error.errno, error.rank]
    assert loaded is not None
    tensor = into["w"]
    assert isinstance(tensor, DTensor)
    (value,) = tensor.to_local().unique().tolist()
    return [loaded.step, value]


def main() -> None:
    root, reports = Path(sys.argv[1]), Path(sys.argv[2])
    fork_writers()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report: dict[str, Any] = {}
    settings = StoreSettings(timeout=timedelta(seconds=30))
    with patch.object(settings_module, "_RETRY_S", 0.3), CheckpointStore(root, settings=settings) as store:
        for step in (OLD, NEW):
            store.save(step, state(step), wait=True)
        with failing(errno.EINTR, 1, rank=1):
            report["once"] = load(store)
        with failing(errno.ESTALE, 1 << 30, rank=1):
            report["always"] = load(store)
        with failing(errno.EIO, 1 << 30, rank=1):
            report["broken disk"] = load(store)
        report["whole"] = load(store)
    (reports / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
