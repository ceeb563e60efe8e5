"""A process by itself that has a checkpoint store: what becomes of its descriptors, its claim and its writer.

Usage: ``checkpoint_process.py ROLE ROOT``; what the roles are, say the functions. Lines of JSON go to standard output.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from made_objects import made
from programs import fork_writers
from state_equality import exact
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ft_transport import CheckpointStore, TransportError
from ft_transport.checkpoint import inventory
from ft_transport.checkpoint.writer_process import WriterProcess

NUM_LEAVES = 3000
MAX_DESCRIPTORS = 256
CLAIM_S = 1.0


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def sleeping_child() -> int:
    """A child that was forked, as a data loader forks its workers: it inherits what is not closed in it."""
    child = os.fork()
    if not child:
        os.close(1)  # Whoever reads what the trainer says does not wait for the child.
        os.close(2)
        signal.pause()
        os._exit(0)
    return child


def hold(root: Path) -> None:
    """Has a store with a writer, beside a child that lives on, until its standard input ends."""
    with made(WriterProcess) as writers, CheckpointStore(root) as store:
        store.save(1, {"weight": torch.ones(10)}, wait=True)
        say(writer=writers[0].process_id, child=sleeping_child())
        sys.stdin.read()


def want(root: Path) -> None:
    """Wants to save where another process may be."""
    try:
        with CheckpointStore(root) as store:
            store.save(2, {"weight": torch.ones(10)}, wait=True)
            say(error=None, steps=store.steps())
    except TransportError as error:
        say(error=type(error).__name__, text=str(error))


# ----------------------------------------------------------------------------------------------- many small tensors


def nested_state() -> dict[str, Any]:
    """As many leaves as a large optimizer has, a third of them sharded, a third in half precision."""
    mesh = init_device_mesh("cpu", (1,))
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {}
    for number in range(NUM_LEAVES // 3):
        whole = torch.randn(32, 16, generator=generator)
        state[str(number)] = {
            "parameter": DTensor.from_local(whole, mesh, [Shard(0)], run_check=False),
            "half": torch.randn(64, generator=generator).bfloat16(),
            "state": {"count": torch.tensor(number)},
        }
    return {"model": state}


def tensors_of(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        else:
            yield value.to_local() if isinstance(value, DTensor) else value


@contextmanager
def watched(process_ids: list[int]) -> Iterator[list[int]]:
    """The most descriptors that each process has had open at once meanwhile."""
    most = [0] * len(process_ids)
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.001):
            for index, process_id in enumerate(process_ids):
                most[index] = max(most[index], len(os.listdir(f"/proc/{process_id}/fd")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        has_ended.set()
        watcher.join()


def many_leaves(root: Path) -> None:
    """Saves and loads 3,000 leaves with few descriptors, and changes them as soon as ``save`` has returned."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))  # The writer inherits it.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = nested_state()
    tensors = list(tensors_of(state))
    assert len(tensors) == NUM_LEAVES
    with made(WriterProcess) as writers, CheckpointStore(root) as store:
        writer = writers[0].process_id
        assert writer is not None
        limits = Path(f"/proc/{writer}/limits").read_text()
        (limit,) = [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")]
        before = exact(state)
        idle = [len(os.listdir(f"/proc/{process}/fd")) for process in (writer, os.getpid())]
        with watched([writer, os.getpid()]) as most:
            handle = store.save(1, state)
            was_done = handle.done()
            for tensor in tensors:
                tensor.zero_()
            handle.result()
        assert exact(state) != before
        # Into tensors that hold zeros by now.
        as_saved = store.load(1, into=state).state
        say(
            is_as_saved=exact(as_saved) == before,
            was_done=was_done,
            writer_grew=most[0] - idle[0],
            trainer_grew=most[1] - idle[1],
            writer_limit=int(limit),
            writer=writer,
        )
        sys.stdin.read()
    dist.destroy_process_group()


ROLES = {role.__name__: role for role in (hold, want, many_leaves)}

if __name__ == "__main__":
    if sys.argv[1] != many_leaves.__name__:  # what is limited there is inherited
        fork_writers()
    with patch.object(inventory, "_CLAIM_S", CLAIM_S):
        ROLES[sys.argv[1]](Path(sys.argv[2]))
