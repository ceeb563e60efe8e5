"""A fresh receiver: fetches a state a few times, checks it, and prints one line of JSON.

    python -m benchmarks.receiver --variant VARIANT --state NAME --address ADDRESS --num-bytes N --num-fetches N

The first fetch is a process's first one, as that of a recovering replica is. Imports, the destination's memory and the
transport's construction come before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable
from typing import Final

import torch

from benchmarks import peers
from benchmarks.ceilings import bare_receiver
from benchmarks.machine import PeakMemory, Watch, back_free_memory
from benchmarks.states import STATE_NAMES, StateSpec, build_destination, digest_of
from ft_transport import HTTPTransport, TransportSettings

_SETTLE_S: Final = 0.2
"""A sender that takes part in the fetch is given this long to be ready."""

Fetch = Callable[[], object]
"""Fetches once and returns the state, or ``None`` where there is none to check."""


def _ours(spec: StateSpec, address: str, *, in_place: bool, verify: bool) -> Fetch:
    own_state = build_destination(spec) if in_place else None
    transport: HTTPTransport[object] = HTTPTransport(
        peers.TIMEOUT,
        state_dict=(lambda: own_state) if in_place else None,
        settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1", verify=verify),
    )
    return lambda: transport.recv_checkpoint(0, address, peers.STEP, peers.TIMEOUT)


def _torchft_http(address: str, num_chunks: int) -> Fetch:
    transport = peers.torchft_http_transport(num_chunks)
    return lambda: transport.recv_checkpoint(0, address, peers.STEP, peers.TIMEOUT)


def _torchft_pg(spec: StateSpec, address: str) -> Fetch:
    own_state = build_destination(spec)
    transport = peers.torchft_pg_transport(address, 1, lambda: own_state)
    return lambda: transport.recv_checkpoint(0, transport.metadata(), peers.STEP, peers.TIMEOUT)


def _bare(address: str, num_bytes: int) -> Fetch:
    destination = torch.full((num_bytes,), 1, dtype=torch.uint8)
    return bare_receiver(int(address), memoryview(destination.numpy()))


def _bare_fresh(address: str, num_bytes: int) -> Fetch:
    def fetch() -> None:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As ours does: fewer and larger page faults.
        memory.madvise(mmap.MADV_HUGEPAGE)
        bare_receiver(int(address), memoryview(memory))()

    return fetch


def _prepare(variant: str, spec: StateSpec, address: str, num_bytes: int) -> Fetch:
    match variant:
        case "ours_verify" | "ours_busy":
            return _ours(spec, address, in_place=True, verify=True)
        case "ours_no_verify":
            return _ours(spec, address, in_place=True, verify=False)
        case "ours_fresh":
            return _ours(spec, address, in_place=False, verify=True)
        case "torchft_http_0" | "torchft_http_0_busy":
            return _torchft_http(address, 0)
        case "torchft_http_8":
            return _torchft_http(address, peers.CHUNKED)
        case "torchft_pg":
            return _torchft_pg(spec, address)
        case "bare":
            return _bare(address, num_bytes)
        case "bare_fresh":
            return _bare_fresh(address, num_bytes)
        case _:
            raise ValueError(f"no variant {variant}")


def _measure(fetch: Fetch, num_bytes: int) -> dict[str, object]:
    back_free_memory(2 * num_bytes)
    memory = PeakMemory.start()
    watch = Watch([os.getpid(), os.getppid()])
    watch.start()
    started_s = time.perf_counter()
    state = fetch()
    seconds = time.perf_counter() - started_s
    others_share = watch.stop()
    peak_bytes = memory.growth_bytes() if memory is not None else None
    return {
        "seconds": seconds,
        "others_share": others_share,
        "peak_bytes": peak_bytes,
        "digest": digest_of(state) if state is not None else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--state", choices=STATE_NAMES, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--address", required=True)
    parser.add_argument("--num-bytes", type=int, required=True)
    parser.add_argument("--num-fetches", type=int, default=3)
    arguments = parser.parse_args()

    spec = StateSpec(arguments.state, arguments.scale)
    fetch = _prepare(arguments.variant, spec, arguments.address, arguments.num_bytes)
    time.sleep(_SETTLE_S)
    fetches = []
    for index in range(arguments.num_fetches):
        if index:
            time.sleep(_SETTLE_S)
        fetches.append(_measure(fetch, arguments.num_bytes))
    print(json.dumps({"fetches": fetches}), flush=True)
    # Server threads and process groups have nothing to say any more, and may take long to say it.
    os._exit(0)


if __name__ == "__main__":
    main()
