"""Deltas: what a step costs that changes one bfloat16 element in a hundred, as engines that pull see it.

The engines are real ``WeightReceiver``s in a network namespace, behind a link of 1 Gbit/s. One publisher sends them the
elements that changed, another one, as for weights of which whole parts change, the chunks that changed: all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.options import Benchmark, Options, Size
from benchmarks.replicas.pulling import weights_of
from benchmarks.report import Group, Quantity, Role, Sample, Verdict
from ft_transport import HTTPTransport, Publisher, PullingEngine, TransportSettings
from ft_transport.credentials import TOKEN_VARIABLE
from ft_transport.publish import versions
from ft_transport.wire.delta import TensorPair, apply_changes, decode_delta, encode_delta

_FULL_BYTES: Final = 1 << 30
_NUM_TENSORS: Final = 300
_SHARE: Final = 0.01
_TIMEOUT: Final = timedelta(seconds=120)
_TOKEN: Final = "of-this-benchmark"
_ENCODING: Final = Quantity("encoding", "GB/s")
_APPLYING: Final = Quantity("applying", "GB/s")
_SIZE: Final = Quantity("size, of the weights", "%")
_CONFIRMED: Final = Quantity("until confirmed", "s")


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    role: Role
    deltas: bool


_DELTA: Final = _Way("delta", "ours", deltas=True)
_CHUNKS: Final = _Way("chunks that changed", "peer", deltas=False)
_COPY: Final = _Way("copy of the weights", "ceiling", deltas=False)


def run(options: Options) -> Iterator[Group]:
    """Measures the codec on one core, then both ways over the link."""
    num_bytes = int(_FULL_BYTES * options.scale)
    weights = weights_of(_NUM_TENSORS, num_bytes)
    chance = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor.normal_(generator=chance)
    yield _measure_codec(options, weights)
    if os.geteuid() == 0:
        yield _measure_link(options, weights)
    else:
        options.say("delta: only root can make a link of 1 Gbit/s, so it is not measured")


def _stepped(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in weights.items():
        bits = tensor.view(torch.int16).clone()
        at = torch.randint(0, len(bits), (int(len(bits) * _SHARE),), generator=chance)
        bits[at] ^= torch.randint(1, 1 << 15, (len(at),), generator=chance, dtype=torch.int16)
        after[name] = bits.view(torch.bfloat16)
    return after


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy()
    return data


def _measure_codec(options: Options, weights: dict[str, torch.Tensor]) -> Group:
    group = Group("delta", "codec", f"{_SHARE:.0%} of the elements changed, all bits, {_NUM_TENSORS} tensors, one core")
    after = _stepped(weights, 1)
    pairs = [TensorPair(name, 2, _bytes_of(weights[name]), _bytes_of(after[name])) for name in weights]
    target = {name: tensor.clone() for name, tensor in weights.items()}
    gigabytes = sum(len(pair.new) for pair in pairs) / 1e9
    encoded = b""
    for number, way in options.rounds("codec", (_DELTA, _COPY)):
        started_s = time.perf_counter()
        if way is _COPY:
            for name, tensor in target.items():
                np.copyto(_bytes_of(tensor), _bytes_of(weights[name]))
            rate = gigabytes / (time.perf_counter() - started_s)
            group.add(way, _ENCODING, Sample(number, rate))
            group.add(way, _APPLYING, Sample(number, rate))
            continue
        made = encode_delta(2, 1, pairs)
        assert made is not None, "it is smaller"
        encoded = made
        group.add(way, _ENCODING, Sample(number, gigabytes / (time.perf_counter() - started_s)))
        started_s = time.perf_counter()
        for change in decode_delta(encoded).changes():
            apply_changes(change, _bytes_of(target[change.tensor.name]))
        group.add(way, _APPLYING, Sample(number, gigabytes / (time.perf_counter() - started_s)))
        group.add(way, _SIZE, Sample(number, len(encoded) / gigabytes / 1e7))
    group.verdicts = [
        Verdict.at_most("size, % of the weights", group.figure(_DELTA, _SIZE), 3.0),
        Verdict.at_least("encoding, GB/s", group.figure(_DELTA, _ENCODING), 1.0),
        Verdict.at_least("applying, GB/s", group.figure(_DELTA, _APPLYING), 1.0),
    ]
    return group


def _measure_link(options: Options, weights: dict[str, torch.Tensor]) -> Group:
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    group = Group("delta", "1 Gbit/s", f"{num_bytes / 1e9:.2f} GB, {_SHARE:.0%} of the elements changed, 1 Gbit/s")
    ways = (_DELTA, _CHUNKS)
    with ExitStack() as stack:
        here, there, inside = _link(stack)
        command = [*inside, sys.executable, "-m", "benchmarks.replicas.pulling", there]
        engines = stack.enter_context(
            subprocess.Popen(
                [*command, str(_NUM_TENSORS), str(num_bytes), str(len(ways))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, TOKEN_VARIABLE: _TOKEN},
            )
        )
        assert engines.stdin is not None
        assert engines.stdout is not None
        stack.callback(engines.stdin.close)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory)))
        publishers = {}
        for way in ways:
            settings = TransportSettings(host=here, advertise=here, token=_TOKEN)
            transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, settings=settings)
            stack.callback(transport.shutdown)
            publishers[way] = Publisher(
                [PullingEngine(engines.stdout.readline().strip(), token=_TOKEN)],
                directory / way.name,
                engine_timeout=_TIMEOUT,
                transport=transport,
            )
            stack.callback(publishers[way].close)
            publishers[way].publish(0, weights).result()
        current = dict.fromkeys(ways, weights)
        for number, way in options.rounds("1 Gbit/s", ways):
            current[way] = _stepped(current[way], number)
            with nullcontext() if way.deltas else patch.object(versions, "delta_between", return_value=None):
                handle = publishers[way].publish(number + 1, current[way])
                started_s = time.perf_counter()
                handle.result()
            group.add(way, _CONFIRMED, Sample(number, time.perf_counter() - started_s))
    group.sort(ways)
    group.verdicts = [Verdict.at_least("chunks / delta", group.ratio(_CHUNKS, _DELTA, _CONFIRMED), 5.0)]
    return group


def _link(stack: ExitStack) -> tuple[str, str, list[str]]:
    """A link of 1 Gbit/s into a namespace: the address of either end, and what runs a command inside."""
    name, outer, inner = (f"ftb{kind}{os.getpid()}" for kind in ("n", "o", "i"))
    network = f"10.213.{os.getpid() % 250}"
    here, there = f"{network}.1", f"{network}.2"

    def run_ip(*arguments: str) -> None:
        subprocess.run(arguments, check=True, capture_output=True, timeout=10)

    run_ip("ip", "netns", "add", name)
    stack.callback(run_ip, "ip", "netns", "del", name)
    run_ip("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
    run_ip("ip", "addr", "add", f"{here}/24", "dev", outer)
    run_ip("ip", "link", "set", outer, "up")
    run_ip("tc", "qdisc", "add", "dev", outer, "root", "tbf", "rate", "1gbit", "burst", "1mb", "latency", "50ms")
    inside = ["ip", "netns", "exec", name]
    run_ip(*inside, "ip", "addr", "add", f"{there}/24", "dev", inner)
    run_ip(*inside, "ip", "link", "set", inner, "up")
    return here, there, inside


BENCHMARK: Final = Benchmark(
    name="delta",
    question="What does a delta between two versions save?",
    run=run,
    default=Size(scale=1.0, num_samples=3),
)
