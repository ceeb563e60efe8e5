"""A fresh rank that receives its part of a sharded state once, checks it, and prints one line of JSON.

python -m benchmarks.reshard_receiver --layout 2@0 --rank 0 --scale 1 --same|--sharded ADDRESS...
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from benchmarks import peers
from benchmarks.layouts import ShardedSpec, build, ensure_process_group, is_right
from benchmarks.machine import Watch, back_free_memory
from ft_transport import HTTPTransport, TransportSettings

_SETTLE_S = 0.2


def _loopback_bytes() -> int:
    """What has come over loopback so far: requests, answers, headers and acknowledgements of all connections."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("no loopback interface")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", type=ShardedSpec.parse, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--same", action="store_true", help="from the one peer that has the same part")
    parser.add_argument("addresses", nargs="+")
    arguments = parser.parse_args()

    ensure_process_group()
    state = build(arguments.layout, arguments.rank, arguments.scale, is_source=False)
    num_bytes = sum(tensor.to_local().nbytes for tensor in state.values())  # type: ignore[attr-defined]
    transport: HTTPTransport[object] = HTTPTransport(
        peers.TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    )
    back_free_memory(num_bytes)
    time.sleep(_SETTLE_S)
    watch = Watch([os.getpid(), os.getppid()])
    watch.start()
    before = _loopback_bytes()
    started_s = time.perf_counter()
    if arguments.same:
        transport.fetch(arguments.addresses[0], peers.STEP, into=state)
    else:
        transport.fetch_sharded(arguments.addresses, peers.STEP, into=state, group_rank=arguments.rank)
    seconds = time.perf_counter() - started_s
    moved_bytes = _loopback_bytes() - before
    others_share = watch.stop()
    report = {
        "seconds": seconds,
        "num_bytes": num_bytes,
        "moved_bytes": moved_bytes,
        "others_share": others_share,
        "is_right": is_right(state, arguments.scale),
    }
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
