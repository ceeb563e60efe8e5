"""The ways in which a model's state is copied while it trains: ours, DCP's, torchft's and lm-resiliency's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from benchmarks.gpu.model import DeviceModel, has_gpu
from benchmarks.report import Named
from benchmarks.transports import TIMEOUT, our_transport, torchft_http_transport, torchft_is_installed
from ft_transport import CheckpointStore, Limits, Publisher
from manager import StateManager

PERIOD: Final = 10
"""Each tenth step has a copy."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Begun:
    """A copy on its way.

    Attributes:
        wait: Returns when the copy is complete; called on another thread.
        clean_up: Called afterwards.
    """

    wait: Callable[[], object] = _nothing
    clean_up: Callable[[], object] = _nothing


@dataclass(frozen=True, slots=True)
class Copying:
    """How one variant copies the state of a step.

    Attributes:
        begin: Called before forward.
        before_optimizer: Called between backward and the optimizer's step.
        every_step: Called before each forward.
    """

    begin: Callable[[int], Begun]
    before_optimizer: Callable[[], None] = _nothing
    every_step: Callable[[int], object] = lambda _step: None


Make = Callable[[DeviceModel, Path, ExitStack], Copying]
"""Prepares the copies of a model, which may use a directory; the stack releases all."""


def _copy_nothing(_training: DeviceModel, _directory: Path, _stack: ExitStack) -> Copying:
    return Copying(lambda _step: Begun())


# -------------------------------------------------------------------------------------------------------------- ours


def managed(training: DeviceModel, stack: ExitStack, **settings: Any) -> StateManager:
    """A manager of the model without a quorum."""
    manager = StateManager(**settings)
    stack.callback(manager.shutdown)
    manager.register("model", training.model, is_stable=True)
    manager.register("optimizer", training.optimizer)
    stack.callback(manager.attach(training.optimizer).remove)
    return manager


def _snapshot(training: DeviceModel, _directory: Path, stack: ExitStack) -> Copying:
    manager = managed(training, stack, checkpoint_transport=our_transport(limits=Limits(max_snapshots=1)))
    return Copying(lambda _step: Begun(manager.snapshot().result), every_step=manager.start_step)


def _keep(training: DeviceModel, _directory: Path, stack: ExitStack) -> Copying:
    manager = managed(training, stack, checkpoint_transport=our_transport(), keep_every=PERIOD)

    def begin(step: int) -> Begun:
        if step:
            # The step's boundary has begun the snapshot.
            return Begun(wait_for_kept(manager), lambda: check_kept(manager, step))
        # The first boundary after a step allocates and page-locks the memory, on another thread.
        manager.start_step(1)
        wait_for_memory(manager)
        return Begun()

    return Copying(begin, every_step=manager.start_step)


def check_kept(manager: StateManager, step: int) -> None:
    """Raises if the manager has kept another step: it keeps none while an earlier one is not finished."""
    keeping: Any = manager._replica.keeping
    if keeping.kept.status().step != step:
        raise RuntimeError(f"expected the state of step {step} to be kept, got step {keeping.kept.status().step}")


def wait_for_memory(manager: StateManager) -> None:
    """Returns when the memory of the next kept state is allocated and page-locked."""
    keeping: Any = manager._replica.keeping
    while keeping.kept._stager._pool._preparing is not None:
        time.sleep(0.01)


def wait_for_kept(manager: StateManager) -> Callable[[], object]:
    """Returns a function that waits until the last kept state is complete."""
    keeping: Any = manager._replica.keeping
    return keeping._job.result  # type: ignore[no-any-return]


def _save(training: DeviceModel, directory: Path, stack: ExitStack) -> Copying:
    store = stack.enter_context(CheckpointStore(directory / "ours"))
    manager = managed(training, stack, checkpoint_store=store)

    def begin(_step: int) -> Begun:
        return Begun(manager.save().result, lambda: store.prune(keep=1))

    return Copying(begin, every_step=manager.start_step)


def _publish(training: DeviceModel, directory: Path, stack: ExitStack) -> Copying:
    publisher = stack.enter_context(Publisher([], directory / "versions", engine_timeout=TIMEOUT))
    return Copying(lambda step: Begun(publisher.publish(step + 1, training.model.state_dict()).result))


# ------------------------------------------------------------------------------------------------------------- peers


def _dcp(training: DeviceModel, directory: Path, stack: ExitStack, *, is_process: bool) -> Copying:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _async_process_executor
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    # The process that writes joins a group of its own, by the same store.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {"DCP_USE_PREFIX_STORE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.port)}
    stack.enter_context(patch.dict(os.environ, found))  # the replicas of other benchmarks must not find it
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", rendezvous), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    is_gpu = has_gpu()
    stager = DefaultStager(StagingOptions(is_gpu, is_process, is_gpu, is_gpu))
    # torch 2.11 closes the memory after each stage, so that the next one fails.
    inner = stager._state_dict_stager
    stack.callback(type(inner).close, inner)
    inner.close = lambda: None
    stack.callback(stager.close)
    if is_process:
        # The process has mapped the staged memory until it ends.
        stack.callback(setattr, _async_process_executor, "_CHECKPOINT_PROCESS", None)
    kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
    path = directory / "dcp"
    staged: list[Future[Any]] = []

    def begin(_step: int) -> Begun:
        # Its stager cannot copy some containers of an optimizer's state.
        named = {str(number): tensor for number, tensor in enumerate(training.tensors())}
        writer = dcp.FileSystemWriter(path)
        response = dcp.async_save(named, storage_writer=writer, async_stager=stager, async_checkpointer_type=kind)
        if not isinstance(response, Future):
            staged.append(response.staging_completion)
            response = response.upload_completion
        return Begun(response.result, lambda: shutil.rmtree(path))

    def wait_for_staging() -> None:
        while staged:
            staged.pop().result()

    return Copying(begin, before_optimizer=wait_for_staging)


def _torchft(training: DeviceModel, _directory: Path, stack: ExitStack) -> Copying:
    transport = torchft_http_transport(0)
    stack.callback(transport.shutdown)

    def begin(step: int) -> Begun:
        transport.send_checkpoint([1], step, training.state(), TIMEOUT)
        return Begun()

    return Copying(begin, before_optimizer=transport.disallow_checkpoint)


def lm_resiliency_manager(directory: Path) -> Any:
    """Its manager of checkpoints in memory, as for a job whose replicas have the same state: with two buffers."""
    from lm_resiliency.checkpointing.config import InMemoryCkptConfig
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

    config = InMemoryCkptConfig(
        interval=PERIOD, disk_flush_interval=0, disk_folder=str(directory), run_id="benchmark", pin_memory=has_gpu()
    )
    return InMemoryCheckpointManager(config, parallelism_info=SimpleNamespace(dp_replicate=2, dp_shard=2))


def _lm_resiliency(training: DeviceModel, directory: Path, stack: ExitStack) -> Copying:
    manager = lm_resiliency_manager(directory / "lm-resiliency")
    stack.callback(manager.close)
    tensors = training.tensors()

    def begin(step: int) -> Begun:
        manager.save_tensors(tensors, step + 1)
        return Begun(manager._completion_thread.join)

    # Without this call, the optimizer may write while the copy reads.
    return Copying(begin, before_optimizer=manager.maybe_wait)


ALONE: Final = Named("training alone", "ceiling")
SNAPSHOT: Final = Named("ft_transport snapshot", "ours")
KEEP: Final = Named("ft_transport keep_every", "ours")
SAVE: Final = Named("ft_transport save", "ours")
PUBLISH: Final = Named("ft_transport publish to disk, weights only", "ours")
DCP: Final = Named("DCP async_save, pinned, kept stager", "peer")
DCP_PROCESS: Final = Named("DCP async_save, pinned, kept stager, process", "peer")
TORCHFT: Final = Named("torchft HTTPTransport", "peer")
LM_RESILIENCY: Final = Named("lm-resiliency, in memory", "peer")

_WAYS: Final[dict[Named, Make]] = {
    ALONE: _copy_nothing,
    SNAPSHOT: _snapshot,
    KEEP: _keep,
    SAVE: _save,
    PUBLISH: _publish,
    DCP: partial(_dcp, is_process=False),
    DCP_PROCESS: partial(_dcp, is_process=True),
    TORCHFT: _torchft,
    LM_RESILIENCY: _lm_resiliency,
}


def lm_resiliency_is_installed() -> bool:
    return importlib.util.find_spec("lm_resiliency") is not None


def installed_ways() -> dict[Named, Make]:
    """The ways to copy whose programs are installed."""
    is_missing = {TORCHFT: not torchft_is_installed(), LM_RESILIENCY: not lm_resiliency_is_installed()}
    return {variant: make for variant, make in _WAYS.items() if not is_missing.get(variant)}
