"""The managers that are compared: ours, torchft's, and none. All are used as a loop without DDP uses them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from benchmarks.replicas.parts import PartRecorder, record_ours, record_torchft
from benchmarks.replicas.training import Training
from benchmarks.report import Role
from benchmarks.transports import TIMEOUT, our_transport

_REPLAY_BYTES: Final = 16 << 30
_SLOW_BYTES_PER_S: Final = 200_000_000
_NO_LIMITS: Final[Mapping[str, int]] = {}


class Loop(Protocol):
    """What a training loop calls."""

    def start_quorum(self) -> None: ...
    def allreduce(self, tensor: torch.Tensor) -> Any: ...
    def should_commit(self) -> bool: ...
    def current_step(self) -> int: ...
    def is_participating(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerVariant:
    """One of the managers.

    Attributes:
        make: Makes it for a training: name of the replica and address of the Lighthouse follow.
        record: Has the parts of its healing noted.
        needs_lighthouse: Whether its quorums come from one.
    """

    name: str
    role: Role
    make: Callable[[Training, str, str], Loop]
    record: Callable[[PartRecorder], None]
    needs_lighthouse: bool = True


class _NoManager:
    """No quorum is asked for, nothing is reduced, every step counts."""

    _step = 0

    def start_quorum(self) -> None:
        pass

    def allreduce(self, _tensor: torch.Tensor) -> _NoManager:
        return self

    def wait(self) -> None:
        pass

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def is_participating(self) -> bool:
        return True


def join_at_once() -> None:
    """Let managers of this process receive a state in the quorum only, and none before it."""
    from manager.quorum.membership import Membership

    Membership.running_members = lambda _self: ()  # type: ignore[method-assign]


def _ours(
    training: Training, name: str, lighthouse: str, limits: Mapping[str, int] = _NO_LIMITS, **settings: Any
) -> Loop:
    from ft_transport import Limits
    from manager import Manager, ManagerConfig

    transport = our_transport(limits=Limits(**limits))
    config = ManagerConfig(min_replica_size=1, replica_id=name, timeout=TIMEOUT, lighthouse_addr=lighthouse, **settings)
    manager = Manager(config=config, checkpoint_transport=transport)
    # Nothing but the attached optimizer changes it, and that inside write sections.
    manager.register("model", training.model, is_stable=True)
    manager.register("optimizer", training.optimizer)
    manager.attach(training.optimizer)
    return manager


def _torchft(training: Training, name: str, lighthouse: str) -> Loop:
    import socket

    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    # A machine's own name need not lead to the loopback interface.
    socket.gethostname = lambda: "localhost"
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()},
        min_replica_size=1,
        replica_id=name,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        lighthouse_addr=lighthouse,
    )
    manager._benchmark_store = store
    return manager  # type: ignore[no-any-return]


def _none(_training: Training, _name: str, _lighthouse: str) -> Loop:
    return _NoManager()


def _record_nothing(_recorder: PartRecorder) -> None:
    pass


def _ours_at_once(training: Training, name: str, lighthouse: str) -> Loop:
    join_at_once()
    return _ours(training, name, lighthouse)


def slow(variant: ManagerVariant) -> ManagerVariant:
    """One of ours whose replicas send at most 200 MB/s."""
    make = functools.partial(variant.make, limits={"max_send_bytes_per_s": _SLOW_BYTES_PER_S})
    return dataclasses.replace(variant, make=make)


OURS: Final = ManagerVariant(name="ft_transport", role="ours", make=_ours, record=record_ours)
OURS_AT_ONCE: Final = ManagerVariant(
    name="ours, all in the quorum", role="other", make=_ours_at_once, record=record_ours
)
OURS_FOLLOWING: Final = ManagerVariant(
    name="ft_transport, newcomers follow",
    role="ours",
    make=functools.partial(_ours, replay_bytes=_REPLAY_BYTES),
    record=record_ours,
)
TORCHFT: Final = ManagerVariant(name="torchft", role="peer", make=_torchft, record=record_torchft)
NO_MANAGER: Final = ManagerVariant(
    name="no manager", role="ceiling", make=_none, record=_record_nothing, needs_lighthouse=False
)
