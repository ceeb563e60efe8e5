"""One rank that saves a checkpoint and dies, with a store that outlives it: ``restarted_ranks.py DIRECTORY STEP``.

torch's own process group is a fake one: a real one fails in a store with the keys of an earlier run (pytorch#135712).
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from ft_transport import CheckpointStore


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    checkpoints = CheckpointStore(sys.argv[1])
    checkpoints.save(int(sys.argv[2]), {"weight": torch.full((4,), 1.0)}).result()
    print(checkpoints.latest(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
