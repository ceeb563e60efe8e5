"""Read once and passed on, or read by each: ``python -m benchmarks.checkpoint_reading [--ranks N] [--megabytes M]``.

Ranks that all hold the same state (data parallelism) load it from files in the page cache, in both ways in turn. That
is the best case for reading by each: storage that is slower than memory turns it round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ft_transport import CheckpointStore, StoreSettings

NUM_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_in is not None:
        _run_rank(arguments.rank_in, arguments.megabytes)
        return
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-reading-", dir=arguments.directory)).absolute()
    own = ["--megabytes", str(arguments.megabytes), "--rank-in", str(directory)]
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    try:
        subprocess.run(
            [sys.executable, "-m", *ranks, "-m", "benchmarks.checkpoint_reading", *own], check=True, timeout=600
        )
    finally:
        shutil.rmtree(directory)


def _run_rank(directory: Path, megabytes: int) -> None:
    dist.init_process_group("gloo")
    state = {"model": {f"layer.{number}": torch.rand(1 << 20) for number in range(megabytes // 4)}}
    for tensor in state["model"].values():
        dist.broadcast(tensor, 0)
    with CheckpointStore(directory) as store:
        store.save(1, state, wait=True)
    ways = ("once", "each")
    stores = {way: CheckpointStore(directory, read_only=True, settings=StoreSettings(read=way)) for way in ways}  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    read: dict[str, int] = {}
    for number in range(NUM_ROUNDS + 1):
        for way in ways if number % 2 else ways[::-1]:
            dist.barrier()
            started_s = time.perf_counter()
            loaded = stores[way].load(1, into=state)
            dist.barrier()
            if number:  # The first makes connections.
                seconds[way].append(time.perf_counter() - started_s)
            total = torch.tensor([loaded.num_bytes_read])
            dist.all_reduce(total)
            read[way] = int(total)
    if dist.get_rank() == 0:
        size = megabytes << 20
        print(f"{dist.get_world_size()} ranks, {size / 1e6:.0f} MB each, files in the page cache, {NUM_ROUNDS} rounds")
        for way in ways:
            times = seconds[way]
            middle = statistics.median(times)
            print(
                f"{way}: {middle:.3f} s ({min(times):.3f} to {max(times):.3f}), {size / middle / 1e9:.2f} GB/s for "
                f"each rank, {read[way] / size:.2f} x of the state read"
            )
        ratios = sorted(once / each for once, each in zip(seconds["once"], seconds["each"], strict=True))
        print(f"once / each: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    for store in stores.values():
        store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
