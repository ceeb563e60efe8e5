"""One replica under a quorum, ours or torchft's; a process of the benchmarks ``heal`` and ``steps``.

Reports in lines of JSON on standard output; times are of the monotonic clock, which all processes of a machine share.
``quorum``: the first quorum that has this replica in it has come. ``part``: something that healing consists of, and how
long it took. ``step``: when an iteration began, when it ended, and which step is committed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Protocol

import torch

from benchmarks.machine import back_free_memory

TIMEOUT: Final = timedelta(seconds=60)
_NUM_TENSORS: Final = 16
_ADAPTER_SHARE: Final = 0.01
"""About as much as low-rank adapters train of a model (Hu et al., LoRA, 2021)."""


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **fields}), flush=True)


@contextlib.contextmanager
def timed_part(name: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    say("part", name=name, seconds=time.monotonic() - started_s)


class _Loop(Protocol):
    """What ours and torchft's managers have in common."""

    def start_quorum(self) -> None: ...
    def allreduce(self, tensor: torch.Tensor) -> Any: ...
    def should_commit(self) -> bool: ...
    def current_step(self) -> int: ...
    def num_participants(self) -> int: ...


class _Training:
    """Equal tensors, trained with AdamW: all of them, or a small adapter of each, and they themselves are frozen."""

    def __init__(self, state_bytes: int, *, is_adapter: bool) -> None:
        # AdamW keeps two numbers for each one that is trained.
        num_items = state_bytes // 4 // _NUM_TENSORS
        num_trained = max(1, int(num_items * _ADAPTER_SHARE) if is_adapter else num_items // 3)
        self.trained = [torch.nn.Parameter(torch.randn(num_trained)) for _ in range(_NUM_TENSORS)]
        frozen = [torch.randn(num_items - 3 * num_trained) for _ in range(_NUM_TENSORS if is_adapter else 0)]
        self.model = torch.nn.ParameterList(
            [*self.trained, *(torch.nn.Parameter(each, requires_grad=False) for each in frozen)]
        )
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.stack([parameter.square().mean() for parameter in self.trained]).sum().backward()


def _ours(training: _Training, arguments: argparse.Namespace) -> _Loop:
    from ft_transport import HTTPTransport, TransportSettings
    from manager import Manager, ManagerConfig, Recovery

    class Timed(Manager):
        has_asked = False

        def _ask(self, *positional: Any, **keywords: Any) -> Any:
            decision = super()._ask(*positional, **keywords)
            if not self.has_asked:
                self.has_asked = True
                say("quorum")
            return decision

        def recover(self, *positional: Any, **keywords: Any) -> Recovery:
            with timed_part("snapshot at the source, transfer, load, compare"):
                return super().recover(*positional, **keywords)

        def _load(self, state: object) -> None:
            with timed_part("load"):
                super()._load(state)

        def _refuse_differences(self, *positional: Any) -> None:
            with timed_part("compare"):
                super()._refuse_differences(*positional)

    transport: HTTPTransport[Any] = HTTPTransport(
        TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    )
    config = ManagerConfig(
        min_replica_size=1, replica_id=arguments.name, use_async_quorum=not arguments.sync, timeout=TIMEOUT
    )
    manager = Timed(config=config, checkpoint_transport=transport)
    # Nothing but the attached optimizer changes it, and that inside write sections.
    manager.register("model", training.model, is_stable=True)
    manager.register("optimizer", training.optimizer)
    manager.attach(training.optimizer)
    return manager


def _torchft(training: _Training, arguments: argparse.Namespace) -> _Loop:
    import socket

    from torch.distributed import TCPStore
    from torchft import manager as upstream
    from torchft.checkpointing import HTTPTransport
    from torchft.process_group import ProcessGroupGloo

    # A machine's own name need not lead to the loopback interface.
    socket.gethostname = lambda: "localhost"  # type: ignore[assignment]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    class TimedTransport(HTTPTransport[Any]):
        def send_checkpoint(self, *positional: Any, **keywords: Any) -> None:
            with timed_part("send"):
                super().send_checkpoint(*positional, **keywords)

        def recv_checkpoint(self, *positional: Any, **keywords: Any) -> Any:
            with timed_part("transfer"):
                return super().recv_checkpoint(*positional, **keywords)

    class TimedClient:
        def __init__(self, client: Any) -> None:
            self._client = client
            self._has_asked = False

        def _quorum(self, *positional: Any, **keywords: Any) -> Any:
            quorum = self._client._quorum(*positional, **keywords)
            if not self._has_asked:
                self._has_asked = True
                say("quorum")
            return quorum

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

    def load(state: dict[str, Any]) -> None:
        with timed_part("load"):
            training.model.load_state_dict(state["model"])
            training.optimizer.load_state_dict(state["optimizer"])

    manager = upstream.Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()},
        min_replica_size=1,
        replica_id=arguments.name,
        use_async_quorum=not arguments.sync,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        checkpoint_transport=TimedTransport(TIMEOUT, num_chunks=arguments.num_chunks),
    )
    manager._client = TimedClient(manager._client)
    manager._kept_store = store
    return manager  # type: ignore[no-any-return]


_KINDS: Final[dict[str, Callable[[_Training, argparse.Namespace], _Loop]]] = {"ours": _ours, "torchft": _torchft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(_KINDS))
    parser.add_argument("name")
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--adapter", action="store_true", help="1 % is trained, the rest is frozen")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--num-chunks", type=int, default=0, help="of torchft's transport")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # What a process touches first, the host has to find; found pages are filled at ten times the speed.
    back_free_memory(4 * arguments.state_bytes)
    training = _Training(arguments.state_bytes, is_adapter=arguments.adapter)
    # Imported ahead: from here on, starting costs the managers' own time.
    importlib.import_module({"ours": "manager", "torchft": "torchft.manager"}[arguments.kind])
    say("ready")
    sys.stdin.readline()
    # With its manager a replica gives signs of life, and the quorum waits for it.
    manager = _KINDS[arguments.kind](training, arguments)
    stopped = threading.Event()

    def stop_with_parent() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=stop_with_parent, daemon=True).start()
    while not stopped.is_set():
        started_s = time.monotonic()
        manager.start_quorum()
        training.backward()
        works = [manager.allreduce(parameter.grad) for parameter in training.trained]
        for work in works:
            work.wait()
        committed = manager.should_commit()
        if committed:
            training.optimizer.step()
        say(
            "step",
            began_s=started_s,
            ended_s=time.monotonic(),
            step=manager.current_step(),
            committed=committed,
            participants=manager.num_participants(),
        )
    # What is still under way ends with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
