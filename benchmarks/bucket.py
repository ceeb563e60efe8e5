"""Bucket: what a checkpoint in a bucket costs beside obstore alone, and beside DCP with s3fs.

The server is moto's S3 server, in a process of its own: all variants send the same bytes to it over loopback. A save is
preceded by a change of every tensor. obstore alone puts and gets the same bytes, in requests of the same length.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import obstore
import torch
from obstore.store import from_url

from benchmarks.machine import Watch, back_free_memory, own_processes
from benchmarks.options import Benchmark, Options, Size, rotated
from benchmarks.processes import in_fresh_process
from benchmarks.report import Group, Named, Quantity, Sample, Verdict
from benchmarks.states import StateSpec, build_source, digest_of, num_bytes_of, tensors_of
from benchmarks.transports import clone, our_transport
from ft_transport import CheckpointStore, Limits
from ft_transport.cli.bench import MemoryCopy

PAUSE: Final = Quantity("pause", "ms")
DURABLE: Final = Quantity("in the bucket", "ms")
LOAD: Final = Quantity("load", "ms")
MEMORY: Final = Quantity("memory of the writer beyond the snapshot", "MB")

OURS: Final = Named("ft_transport", "ours")
CLONE: Final = Named("the transport's clone alone", "other")
BARE: Final = Named("obstore alone", "ceiling")
DCP: Final = Named("DCP's FsspecWriter with s3fs", "peer")

_URL: Final = "s3://bucket/ours"
_PUT_BYTES: Final = 16 << 20
_GET_BYTES: Final = 4 << 20
_NUM_PUTS: Final = 8
_NUM_GETS: Final = 12
_NUM_REPEATS: Final = 3
_READY_S: Final = 60.0


@dataclass(slots=True)
class _Outcome:
    """Measurements: variant, quantity, value, and the share of the cores that other processes took."""

    num_bytes: int
    values: list[tuple[Named, Quantity, float, float | None]] = field(default_factory=list)
    note: str = ""


@contextlib.contextmanager
def _served() -> Iterator[None]:
    """Serve an empty bucket, which this process and its children find through the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline_s = time.monotonic() + _READY_S
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=10).close()
                    break
                if time.monotonic() > deadline_s:
                    raise RuntimeError("expected moto's server to be ready")
                time.sleep(0.1)
            os.environ.update(
                AWS_ENDPOINT_URL=url,
                AWS_ACCESS_KEY_ID="bench",
                AWS_SECRET_ACCESS_KEY="bench",
                AWS_REGION="us-east-1",
                AWS_DEFAULT_REGION="us-east-1",
                AWS_ALLOW_HTTP="true",
            )
            yield
        finally:
            server.kill()


class _Peak:
    """The most memory that a process has of its own in the block, besides files that it maps, in bytes."""

    def __init__(self, process_id: int) -> None:
        self._path = Path(f"/proc/{process_id}/status")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.num_bytes = self._now()

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _now(self) -> int:
        line = next(each for each in self._path.read_text().splitlines() if each.startswith("RssAnon:"))
        return int(line.split()[1]) << 10

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            self.num_bytes = max(self.num_bytes, self._now())


def run(options: Options) -> Iterator[Group]:
    with _served():
        for name in options.states:
            spec = StateSpec(name, options.scale)
            group = Group("bucket", spec.name, spec.title)
            for round_number, _ in options.rounds(f"bucket {spec.name}", (OURS,)):
                outcome = in_fresh_process(_measure, spec, round_number)
                for variant, quantity, value, others_share in outcome.values:
                    group.add(variant, quantity, Sample(round_number, value, others_share))
                group.title = f"{spec.title}, {outcome.num_bytes / 1e9:.2f} GB"
                group.notes += [outcome.note] if outcome.note and outcome.note not in group.notes else []
            group.sort((OURS, CLONE, BARE, DCP))
            group.verdicts = _judge(group)
            yield group


def _judge(group: Group) -> list[Verdict]:
    return [
        Verdict.at_most("save() holds the trainer / the transport's clone", group.ratio(OURS, CLONE, PAUSE), 1.05),
        Verdict.at_least("rate of a save / of obstore alone", group.ratio(BARE, OURS, DURABLE), 0.8),
        Verdict.at_least("rate of a load / of obstore alone", group.ratio(BARE, OURS, LOAD), 0.8),
        Verdict.at_most("memory of the writer beyond the snapshot", group.figure(OURS, MEMORY), 64.0),
        Verdict.at_least("rate of a save / of DCP's", group.ratio(DCP, OURS, DURABLE), 1.5),
    ]


class _Measuring:
    """The state of a process, and one method for each thing that it measures."""

    def __init__(self, spec: StateSpec, store: CheckpointStore) -> None:
        self.state = build_source(spec)
        self.outcome = _Outcome(num_bytes_of(self.state))
        back_free_memory(3 * self.outcome.num_bytes)
        self._plain = MemoryCopy(list(tensors_of(self.state)))
        self._transport = our_transport(limits=Limits(max_snapshots=1))
        self._bare = from_url("s3://bucket/bare")
        self._store = store
        self._step = 0

    def close(self) -> None:
        self._transport.shutdown()
        self._plain.close()

    def change(self) -> None:
        with torch.no_grad():
            for tensor in tensors_of(self.state):
                tensor.add_(1)

    def clone(self) -> None:
        with Watch(own_processes()) as watch:
            snapshot = clone(self._transport, self.state)
        snapshot.abandon()
        self._note(CLONE, PAUSE, watch)

    def save_ours(self) -> None:
        self._step += 1
        writer = self._store._background._resources.writer.process_id
        assert writer is not None, "the store has started its writer"
        with _Peak(writer) as peak, Watch(own_processes()) as watch:
            handle = self._store.save(self._step, self.state)
            pause_s = watch.elapsed_s()
            handle.result()
        self._note(OURS, PAUSE, watch, pause_s)
        self._note(OURS, DURABLE, watch)
        self.outcome.values.append((OURS, MEMORY, peak.num_bytes / 1e6, None))
        for old in self._store.steps()[:-1]:
            self._store._root.delete(self._store._root.retire(old))

    def save_bare(self) -> None:
        memory = self._plain.memory

        def put(at: int) -> None:
            obstore.put(self._bare, f"part.{at}", memory[at : at + _PUT_BYTES], use_multipart=False)

        with ThreadPoolExecutor(_NUM_PUTS) as pool, Watch(own_processes()) as watch:
            for _ in pool.map(put, range(0, len(memory), _PUT_BYTES)):
                pass
        self._note(BARE, DURABLE, watch)

    def save_dcp(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        with Watch(own_processes()) as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state, storage_writer=FsspecWriter("s3://bucket/dcp"), no_dist=True)
        self._note(DCP, DURABLE, watch)

    def load_ours(self) -> None:
        expected = digest_of(self.state)
        with torch.no_grad():
            for tensor in tensors_of(self.state):
                tensor.zero_()
        with Watch(own_processes()) as watch:
            self._store.load(into=self.state)
        if digest_of(self.state) != expected:
            raise RuntimeError("another state was loaded than was saved")
        self._note(OURS, LOAD, watch)

    def load_bare(self) -> None:
        memory = self._plain.memory

        def get(at: int) -> None:
            start = at % _PUT_BYTES
            length = min(_GET_BYTES, len(memory) - at)
            data = obstore.get_range(self._bare, f"part.{at - start}", start=start, length=length)
            memory[at : at + length] = memoryview(data)

        with ThreadPoolExecutor(_NUM_GETS) as pool, Watch(own_processes()) as watch:
            for _ in pool.map(get, range(0, len(memory), _GET_BYTES)):
                pass
        self._note(BARE, LOAD, watch)

    def _note(self, variant: Named, quantity: Quantity, watch: Watch, seconds: float | None = None) -> None:
        value = (watch.seconds if seconds is None else seconds) * 1e3
        self.outcome.values.append((variant, quantity, value, watch.others_share))


def _measure(spec: StateSpec, turn: int) -> _Outcome:
    """Run in a fresh process; the first turn of each kind does not count."""
    with CheckpointStore(f"{_URL}/{spec.name}-{turn}") as store:
        measuring = _Measuring(spec, store)
        saves = [measuring.clone, measuring.save_ours, measuring.save_bare]
        if importlib.util.find_spec("s3fs") is not None:
            saves.append(measuring.save_dcp)
        else:
            measuring.outcome.note = "s3fs is not installed, so DCP was not measured"
        for number in range(_NUM_REPEATS + 1):
            measuring.change()
            loads = (measuring.load_ours, measuring.load_bare)
            for measure in (*rotated(saves, turn + number), *rotated(loads, turn + number)):
                measure()
            if not number:
                measuring.outcome.values.clear()
        measuring.close()
        return measuring.outcome


BENCHMARK: Final = Benchmark(
    name="bucket",
    question="What does a checkpoint in a bucket cost?",
    run=run,
    states=("big", "adamw"),
    default=Size(scale=0.15, num_samples=1),
)
