"""How long until so many engines use a new adapter: ``python -m benchmarks.publishing [--load-seconds S]``.

The engines are stand-ins (``tests/engine_servers.py``) that take a while for each load, in a process of their own. Told
one after the other, 64 of them would take 64 times as long as one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

from ft_transport import LoRAAdapter, Publisher, VLLMEngine

NUMBERS = (1, 4, 16, 64)
_SERVERS = Path(__file__).resolve().parent.parent / "tests" / "engine_servers.py"
_TARGET = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load-seconds", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=5)
    arguments = parser.parse_args()
    command = [sys.executable, str(_SERVERS), str(sum(NUMBERS)), str(arguments.load_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as servers:
        assert servers.stdin is not None
        assert servers.stdout is not None
        urls = json.loads(servers.stdout.readline())
        with tempfile.TemporaryDirectory() as directory:
            seconds = _measure(urls, Path(directory), arguments.samples)
        servers.stdin.close()
    first = statistics.median(seconds[1])
    for number, times in seconds.items():
        middle = statistics.median(times)
        print(
            f"{number:3} engines: {middle:.3f} s ({min(times):.3f} to {max(times):.3f}) until all have confirmed, "
            f"{middle / first:.2f} x of one"
        )
    worst = statistics.median(seconds[NUMBERS[-1]]) / first
    print(f"flat within {_TARGET} x: {'met' if worst <= _TARGET else 'missed'} ({worst:.2f})")


def _measure(urls: list[str], directory: Path, num_samples: int) -> dict[int, list[float]]:
    """Each number of engines in turn, sample by sample; the time of the slowest engine, from when it was told."""
    adapter = LoRAAdapter(
        {"base_model.model.q.lora_A.weight": torch.rand(8, 512)}, {"r": 8, "lora_alpha": 16, "target_modules": ["q"]}
    )
    publishers = {}
    for number in NUMBERS:
        mine, urls = urls[:number], urls[number:]
        publishers[number] = Publisher(
            [VLLMEngine(url) for url in mine], directory / str(number), engine_timeout=timedelta(seconds=60)
        )
    seconds: dict[int, list[float]] = {number: [] for number in NUMBERS}
    for sample in range(num_samples + 1):
        for number, publisher in publishers.items():
            handle = publisher.publish(sample, adapter)
            started_s = time.perf_counter()
            handle.result()
            if sample:  # The first makes connections.
                seconds[number].append(time.perf_counter() - started_s)
    for publisher in publishers.values():
        publisher.close()
    return seconds


if __name__ == "__main__":
    main()
