"""Restoring: how soon a new process has the state on the device that its killed predecessor has kept or saved.

Both processes are on one host. A save of DCP is read from the page cache. lm-resiliency's memory ends with its process,
so it writes each state to a file in memory as well.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch

from benchmarks.gpu.copying import (
    LM_RESILIENCY,
    lm_resiliency_is_installed,
    lm_resiliency_manager,
    managed,
    wait_for_kept,
    wait_for_memory,
)
from benchmarks.gpu.model import DeviceModel, device_name, failure_notes, has_gpu, noting_failure, synchronize
from benchmarks.options import Options
from benchmarks.processes import Channel, Child
from benchmarks.report import Group, Named, Quantity, Sample, Verdict
from benchmarks.states import num_bytes_of
from benchmarks.transports import our_transport

_STATE_BYTES: Final = 3_000_000_000
_KEPT_STEP: Final = 2
_CHILD_S: Final = 120.0

BACK: Final = Quantity("a new process has the state", "ms")
KEEP: Final = Named("ft_transport keep_every", "ours")
DCP: Final = Named("dcp.save, dcp.load, from the page cache", "peer")
LM_RESILIENCY_FILE: Final = Named(f"{LM_RESILIENCY.name}, files in memory", "peer")
LINK: Final = Named("copy from page-locked memory to the device", "ceiling")


class _Ours:
    def __init__(self, training: DeviceModel, _directory: Path) -> None:
        self._manager = managed(training, ExitStack(), checkpoint_transport=our_transport(), keep_every=1)

    def keep(self) -> None:
        # The first boundary allocates and page-locks the memory.
        for step in range(1, _KEPT_STEP + 1):
            self._manager.start_step(step)
            wait_for_memory(self._manager)
        wait_for_kept(self._manager)()

    def load(self) -> None:
        recovery = self._manager.resume()
        assert recovery is not None, "the killed process has kept a state"

    def close(self) -> None:
        """Ends the keeper, which would have the memory for ten more minutes."""
        self._manager.shutdown()


class _Dcp:
    def __init__(self, training: DeviceModel, directory: Path) -> None:
        self._state = {str(number): tensor for number, tensor in enumerate(training.tensors())}
        self._path = directory / "dcp"

    def keep(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state, checkpoint_id=self._path, no_dist=True)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._state, checkpoint_id=self._path, no_dist=True)

    def close(self) -> None:
        """The process ends."""


class _LmResiliency:
    def __init__(self, training: DeviceModel, directory: Path) -> None:
        self._tensors = training.tensors()
        self._manager = lm_resiliency_manager(Path("/dev/shm") / directory.name)

    def keep(self) -> None:
        self._manager.save_tensors(self._tensors, _KEPT_STEP)
        self._manager.maybe_wait()
        self._manager.flush_to_disk()
        self._manager.close()

    def load(self) -> None:
        loaded = self._manager.load_tensors()
        assert loaded is not None, "the killed process has written its files"
        with torch.no_grad():
            for own, tensor in zip(self._tensors, loaded[0], strict=True):
                own.copy_(tensor)

    def close(self) -> None:
        self._manager.close()


_SIDES: Final[dict[str, Callable[[DeviceModel, Path], _Ours | _Dcp | _LmResiliency]]] = {
    KEEP.name: _Ours,
    DCP.name: _Dcp,
    LM_RESILIENCY_FILE.name: _LmResiliency,
}


def _begin(name: str, directory: str) -> tuple[DeviceModel, _Ours | _Dcp | _LmResiliency]:
    os.environ["TORCHELASTIC_RUN_ID"] = Path(directory).name
    training = DeviceModel(_STATE_BYTES)
    return training, _SIDES[name](training, Path(directory))


def _keep(channel: Channel, name: str, directory: str) -> None:
    """In the first process: keeps a state, and waits to be killed."""
    training, side = _begin(name, directory)
    side.keep()
    channel.say((num_bytes_of(training.state()), training.sums()))
    channel.wait_for_end()


def _restore(channel: Channel, name: str, directory: str) -> None:
    """In the second process: loads the state onto the device."""
    training, side = _begin(name, directory)
    synchronize()
    began_s = time.monotonic()
    side.load()
    synchronize()
    loaded_s = time.monotonic() - began_s
    sums = training.sums()
    side.close()
    channel.say((loaded_s, sums, _copy_s(training) if name == DCP.name else 0.0))
    channel.wait_for_end()


def _copy_s(training: DeviceModel) -> float:
    """Returns the seconds of a copy of the state from page-locked memory."""
    pinned = [torch.ones(tensor.shape, dtype=tensor.dtype, pin_memory=has_gpu()) for tensor in training.tensors()]
    began_s = time.monotonic()
    with torch.no_grad():
        for own, tensor in zip(training.tensors(), pinned, strict=True):
            own.copy_(tensor, non_blocking=True)
    synchronize()
    return time.monotonic() - began_s


def measure_restoring(group: Group, options: Options) -> None:
    """Kills a process, and lets another one load its state, for each side by turns."""
    variants = (KEEP, DCP, *((LM_RESILIENCY_FILE,) if lm_resiliency_is_installed() else ()))
    failures: dict[str, str] = {}
    num_bytes = 0
    for round_number, variant in options.rounds("gpu restoring", variants):
        if variant.name in failures:
            continue
        directory = Path(tempfile.mkdtemp(prefix=f".gpu-benchmark-{uuid4().hex}-", dir=options.directory))
        with noting_failure(variant, failures), ExitStack() as stack:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            stack.callback(shutil.rmtree, Path("/dev/shm") / directory.name, ignore_errors=True)
            trainer = Child(_keep, variant.name, str(directory))
            try:
                num_bytes, expected = trainer.receive(_CHILD_S)
            finally:
                trainer.close()
            successor = Child(_restore, variant.name, str(directory))
            stack.callback(successor.close)
            loaded_s, sums, copied_s = successor.receive(_CHILD_S)
            if sums != expected:
                raise RuntimeError(f"{variant.name}: expected the state of the killed process, got another one")
            group.add(variant, BACK, Sample(round_number, loaded_s * 1e3))
            # Beside a manager, which prepares memory for the next kept state, the copy would be slower.
            if variant is DCP:
                group.add(LINK, BACK, Sample(round_number, copied_s * 1e3))
    group.sort((LINK, *variants))
    group.title = f"a model and AdamW, {num_bytes / 1e9:.2f} GB on {device_name()}, whose process is killed"
    group.notes += failure_notes(failures)
    group.verdicts = [
        Verdict.at_most("milliseconds until a new process has the state", group.figure(KEEP, BACK), 1000.0),
        Verdict.at_least("time to have the state, DCP / ours", group.ratio(DCP, KEEP, BACK), 1.0),
        Verdict.at_least(
            "time to have the state, lm-resiliency / ours", group.ratio(LM_RESILIENCY_FILE, KEEP, BACK), 1.0
        ),
    ]
