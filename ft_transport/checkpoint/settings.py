"""What a checkpoint store may be told, its defaults, and what is refused before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import ConfigurationError
from ft_transport.settings import check_duration, check_number, default_num_threads

BusyPolicy: TypeAlias = Literal["wait", "skip", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What few users change.

    Attributes:
        timeout: How long a rank may go without a heartbeat before the others give it up, and how long its writer
            process may take for anything but writing.
        visible_timeout: How long a new directory may take to be seen by all ranks.
        claim_timeout: How long to wait for a process that still holds the root and is just ending.
        max_attempts: How often a save is tried, where what went wrong may pass.
        max_failed_saves: So many saves in a row may fail, each with a warning; after one more the trainer is stopped.
        busy: What happens to a save while the one before is not finished: it waits, is skipped, or is refused.
        read: ``once``: what several ranks need is read by one of them and passed on. ``each``: everybody reads what
            he needs, which is faster where reading is cheaper than the network between ranks.
        num_copy_threads: Threads that copy a snapshot.
        max_load_bytes: The largest state that is loaded. Default: this machine's memory.
        meshes: Device meshes for loaded DTensors that have no counterpart in the loader's own state.
    """

    timeout: timedelta = timedelta(minutes=10)
    visible_timeout: timedelta = timedelta(seconds=30)
    claim_timeout: timedelta = timedelta(seconds=10)
    max_attempts: int = 3
    max_failed_saves: int = 3
    busy: BusyPolicy = "wait"
    read: Literal["once", "each"] = "once"
    num_copy_threads: int = field(default_factory=default_num_threads)
    max_load_bytes: int = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    meshes: Sequence[DeviceMesh] = ()

    def __post_init__(self) -> None:
        for name in ("timeout", "visible_timeout", "claim_timeout"):
            check_duration(name, getattr(self, name), at_least=timedelta.resolution)
        for name, least in {
            "max_attempts": 1,
            "max_failed_saves": 0,
            "num_copy_threads": 1,
            "max_load_bytes": 1,
        }.items():
            object.__setattr__(self, name, check_number(name, getattr(self, name), at_least=least))
        meshes: object = self.meshes
        if not isinstance(meshes, Sequence) or not all(isinstance(mesh, DeviceMesh) for mesh in meshes):
            raise ConfigurationError(f"expected a sequence of DeviceMesh as meshes, got {meshes!r}")
        for name, known in {"busy": ("wait", "skip", "error"), "read": ("once", "each")}.items():
            if getattr(self, name) not in known:
                raise ConfigurationError(f"expected one of {known} as {name}, got {getattr(self, name)!r}")
