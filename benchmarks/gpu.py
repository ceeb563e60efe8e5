"""GPU: what a snapshot, a save and a fetch cost a model on a CUDA device. Without one, states are small, on the CPU.

``training`` steps a model under AdamW, with nothing else or with a copy of its state in every tenth step. ``moving``
fetches a state of the device's memory into the device's memory of another process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Channel, Child
from benchmarks.report import Group, Named, Quantity, Sample, Verdict, ratio
from benchmarks.states import State, tensors_of
from benchmarks.transports import (
    NO_TORCHFT,
    STEP,
    TIMEOUT,
    on_loopback,
    our_transport,
    torchft_http_transport,
    torchft_is_installed,
)
from ft_transport import CheckpointStore, Limits
from manager import StateManager

_WIDTH: Final = {True: 4096, False: 256}
_NUM_LAYERS: Final = {True: 60, False: 8}
_NUM_ROWS: Final = {True: 32_768, False: 64}
"""By whether there is a GPU. With one, model and optimizer take 12 GB, and forward and backward take longer than a copy
of 12 GB to the host over PCIe 5."""
_MOVED_BYTES: Final = {True: 4 << 30, False: 64 << 20}
_NUM_MOVED: Final = 300
_PERIOD: Final = 10
"""Each tenth step has a copy."""

STEP_TIME: Final = Quantity("a step", "ms")
PAUSE: Final = Quantity("pause", "ms")
COMPLETE: Final = Quantity("until it is complete", "ms")
RATE: Final = Quantity("first fetch", "GB/s")
SEND: Final = Quantity("send_checkpoint", "ms")
ALONE: Final = Named("training alone", "ceiling")
SNAPSHOT: Final = Named("ft_transport snapshot", "ours")
KEEP: Final = Named("ft_transport keep_every", "ours")
SAVE: Final = Named("ft_transport save", "ours")
DCP: Final = Named("DCP async_save, pinned, kept stager", "peer")
TORCHFT: Final = Named("torchft HTTPTransport", "peer")
LINK: Final = Named("copy from the device into page-locked memory", "ceiling")
LOOPBACK: Final = Named("ft_transport over the loopback", "ours")
UNVERIFIED: Final = Named("ft_transport over the loopback, unverified", "ours")
SAME_HOST: Final = Named("ft_transport, same host", "ours")
CHANGED: Final = Named("ft_transport over the loopback, 1 % differs", "ours")


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _synchronize() -> None:
    if _has_gpu():
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if _has_gpu() else "cpu"


class _Training:
    """A stack of linear layers under AdamW."""

    def __init__(self) -> None:
        is_gpu = _has_gpu()
        width = _WIDTH[is_gpu]
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.device(_device()):
            layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_NUM_LAYERS[is_gpu])]
            self.model = torch.nn.Sequential(*layers)
            self._batch = torch.randn(_NUM_ROWS[is_gpu], width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, before_optimizer: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        before_optimizer()
        self.optimizer.step()


@dataclass(frozen=True, slots=True)
class _Copying:
    """How one variant copies the state of a step.

    Attributes:
        begin: Called before forward; returns what waits until the copy is complete.
        before_optimizer: Called between backward and the optimizer's step.
        every_step: Called before each forward.
    """

    begin: Callable[[int], Callable[[], object]]
    before_optimizer: Callable[[], None] = lambda: None
    every_step: Callable[[int], object] = lambda _step: None


def _copy_nothing(_training: _Training, _directory: Path, _stack: ExitStack) -> _Copying:
    return _Copying(lambda _step: lambda: None)


def _snapshot(training: _Training, _directory: Path, stack: ExitStack) -> _Copying:
    manager = StateManager(checkpoint_transport=our_transport(limits=Limits(max_snapshots=1)))
    stack.callback(manager.shutdown)
    manager.register("model", training.model, is_stable=True)
    manager.register("optimizer", training.optimizer)
    manager.attach(training.optimizer)
    return _Copying(lambda _step: manager.snapshot().result, every_step=manager.start_step)


def _keep(training: _Training, _directory: Path, stack: ExitStack) -> _Copying:
    manager = StateManager(checkpoint_transport=our_transport(), keep_every=_PERIOD)
    stack.callback(manager.shutdown)
    manager.register("model", training.model)
    manager.register("optimizer", training.optimizer)
    manager.attach(training.optimizer)
    keeping: Any = manager._replica.keeping

    def begin(step: int) -> Callable[[], object]:
        if step:
            return keeping._job.result  # type: ignore[no-any-return] # the step's boundary has begun the snapshot
        # The first boundary after a step allocates and page-locks the memory, on another thread.
        manager.start_step(1)
        while keeping.kept._stager._pool._preparing is not None:
            time.sleep(0.01)
        return lambda: None

    return _Copying(begin, every_step=manager.start_step)


def _save(training: _Training, directory: Path, stack: ExitStack) -> _Copying:
    store = stack.enter_context(CheckpointStore(directory / "ours"))
    manager = StateManager(checkpoint_store=store)
    stack.callback(manager.shutdown)
    manager.register("model", training.model, is_stable=True)
    manager.register("optimizer", training.optimizer)
    manager.attach(training.optimizer)

    def begin(_step: int) -> Callable[[], object]:
        handle = manager.save()
        return lambda: (handle.result(), store.prune(keep=1))

    return _Copying(begin, every_step=manager.start_step)


def _dcp(training: _Training, directory: Path, stack: ExitStack) -> _Copying:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    stager = DefaultStager(StagingOptions(_has_gpu(), False, _has_gpu(), _has_gpu()))
    stack.callback(stager.close)
    path = directory / "dcp"
    staged: list[Future[Any]] = []

    def begin(_step: int) -> Callable[[], object]:
        # Its stager cannot copy some containers of an optimizer's state.
        named = {str(number): tensor for number, tensor in enumerate(tensors_of(training.state()))}
        response = dcp.async_save(named, storage_writer=dcp.FileSystemWriter(path), async_stager=stager)
        if isinstance(response, Future):
            return lambda: (response.result(), shutil.rmtree(path))
        staged.append(response.staging_completion)
        return lambda: (response.upload_completion.result(), shutil.rmtree(path))

    def wait_for_staging() -> None:
        while staged:
            staged.pop().result()

    return _Copying(begin, before_optimizer=wait_for_staging)


def _torchft(training: _Training, _directory: Path, stack: ExitStack) -> _Copying:
    transport = torchft_http_transport(0)
    stack.callback(transport.shutdown)

    def begin(step: int) -> Callable[[], object]:
        transport.send_checkpoint([1], step, training.state(), TIMEOUT)
        return lambda: None

    return _Copying(begin, before_optimizer=transport.disallow_checkpoint)


_MAKE: Final = {ALONE: _copy_nothing, SNAPSHOT: _snapshot, KEEP: _keep, SAVE: _save, DCP: _dcp, TORCHFT: _torchft}


@contextmanager
def _noting_failure(variant: Named, failures: dict[str, str]) -> Iterator[None]:
    """A peer that fails must not lose the figures of the others."""
    try:
        yield
    except Exception as error:
        if variant.role != "peer":
            raise
        failures[variant.name] = f"{type(error).__name__}: {error}"


def _train(group: Group, options: Options) -> None:
    training = _Training()
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(training.state()))
    group.title = f"a model and AdamW, {num_bytes / 1e9:.2f} GB on {_device_name()}, a copy every {_PERIOD} steps"
    variants = tuple(each for each in _MAKE if each is not TORCHFT or torchft_is_installed())
    with ExitStack() as outer:
        directory = Path(tempfile.mkdtemp(prefix=".gpu-benchmark-", dir=options.directory))
        outer.callback(shutil.rmtree, directory, ignore_errors=True)
        failures: dict[str, str] = {}
        for round_number, variant in options.rounds("gpu training", variants):
            if variant.name in failures:
                continue
            with ExitStack() as stack, _noting_failure(variant, failures):
                own = directory / f"{round_number}-{variant.role}"
                copying = _MAKE[variant](training, own, stack)
                copying.every_step(0)
                copying.begin(0)()  # the first copy allocates and page-locks its memory
                training.step(copying.before_optimizer)
                with Watch([os.getpid()]) as watch:
                    pause_s, complete_s, step_s = _period(training, copying, _PERIOD)
                group.add(variant, STEP_TIME, watch.sample(round_number, step_s * 1e3))
                if variant is not ALONE:
                    group.add(variant, PAUSE, watch.sample(round_number, pause_s * 1e3))
                    group.add(variant, COMPLETE, watch.sample(round_number, complete_s * 1e3))
    group.sort(tuple(_MAKE))
    group.notes += [f"{name} could not be measured: {text}" for name, text in failures.items()]
    group.notes.append("pause: the host's time in the calls before forward and before the optimizer's step")
    group.verdicts = [
        Verdict.at_most(
            f"a step, {variant.name} every {_PERIOD} steps / alone", group.ratio(variant, ALONE, STEP_TIME), 1.01
        )
        for variant in (SNAPSHOT, KEEP, SAVE)
    ] + [Verdict.at_most("pause of a snapshot, ms", group.figure(SNAPSHOT, PAUSE), 5.0)]


def _period(training: _Training, copying: _Copying, first_step: int) -> tuple[float, float, float]:
    """Returns the seconds of the pause, of the copy, and the mean of a step."""
    pause_s = hook_began_s = 0.0

    def before_optimizer() -> None:
        nonlocal hook_began_s
        hook_began_s = time.monotonic()
        copying.before_optimizer()

    def hooks_ended(*_hook_arguments: object) -> None:
        nonlocal pause_s
        pause_s += time.monotonic() - hook_began_s

    # Hooks run in the order of their registration: the manager's own has returned.
    hook = training.optimizer.register_step_pre_hook(hooks_ended)
    _synchronize()
    began_s = time.monotonic()
    wait: Callable[[], object] = lambda: None  # noqa: E731
    for step in range(first_step, first_step + _PERIOD):
        step_began_s = time.monotonic()
        copying.every_step(step)
        if step == first_step:
            wait = copying.begin(step)
        pause_s += time.monotonic() - step_began_s
        training.step(before_optimizer)
    _synchronize()
    step_s = (time.monotonic() - began_s) / _PERIOD
    hook.remove()
    wait()
    return pause_s, time.monotonic() - began_s, step_s


# ------------------------------------------------------------------------------------------------------------ moving


def _state(seed: int) -> State:
    generator = torch.Generator(device=_device()).manual_seed(seed)
    num_items = _MOVED_BYTES[_has_gpu()] // 4 // _NUM_MOVED
    return {f"{index}": torch.rand(num_items, generator=generator, device=_device()) for index in range(_NUM_MOVED)}


def _receive(channel: Channel) -> None:
    """In the receiver's process: makes each fetch that the sender requests, and reports its seconds and sums."""
    into = _state(2)
    _synchronize()
    channel.say("ready")
    while True:
        variant, metadata = channel.wait()
        if variant == TORCHFT.name:
            transport = torchft_http_transport(0)
        else:
            transport = our_transport(same_host=variant == SAME_HOST.name, verify=variant != UNVERIFIED.name)
        began_s = time.monotonic()
        if variant == TORCHFT.name:
            received = transport.recv_checkpoint(0, metadata, STEP, TIMEOUT)
            with torch.no_grad():
                for own, tensor in zip(tensors_of(into), tensors_of(received), strict=True):
                    own.copy_(tensor)
        else:
            known = "into" if variant == CHANGED.name else None
            transport.fetch(metadata, STEP, into=into, timeout=TIMEOUT, known=known)
        _synchronize()
        seconds = time.monotonic() - began_s
        transport.shutdown()
        channel.say((seconds, [float(tensor.double().sum()) for tensor in tensors_of(into)]))


def _move(group: Group, options: Options) -> None:
    state = _state(1)
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(state))
    group.title = f"{_NUM_MOVED} tensors, {num_bytes / 1e9:.2f} GB, between two processes on {_device_name()}"
    ours = (LOOPBACK, UNVERIFIED, SAME_HOST, CHANGED)
    variants = (LINK, *ours, *((TORCHFT,) if torchft_is_installed() else ()))
    # A copy into memory that has not been touched would take longer.
    pinned = [torch.zeros(tensor.shape, pin_memory=_has_gpu()) for tensor in tensors_of(state)]
    receiver = Child(_receive)
    try:
        receiver.receive()
        for round_number, variant in options.rounds("gpu moving", variants):
            if variant is LINK:
                _synchronize()
                with Watch([os.getpid()]) as watch:
                    for source, target in zip(tensors_of(state), pinned, strict=True):
                        target.copy_(source, non_blocking=True)
                    _synchronize()
                group.add(LINK, RATE, watch.sample(round_number, num_bytes / watch.seconds / 1e9))
                continue
            # What the receiver has is what it received last: of each tensor a part, or all of it, is new.
            with torch.no_grad():
                for tensor in tensors_of(state):
                    part = tensor[: len(tensor) // 100] if variant is CHANGED else tensor
                    part.add_(1.0)
            with ExitStack() as stack:
                if variant is TORCHFT:
                    transport = torchft_http_transport(0)
                else:
                    transport = our_transport(same_host=variant is SAME_HOST, limits=Limits(max_snapshots=1))
                stack.callback(transport.shutdown)
                for _is_warm in (False, True):
                    _synchronize()
                    with Watch([os.getpid()]) as watch:
                        transport.send_checkpoint([1], STEP, state, TIMEOUT)
                    if variant is TORCHFT:
                        break
                group.add(
                    TORCHFT if variant is TORCHFT else SNAPSHOT, SEND, watch.sample(round_number, watch.seconds * 1e3)
                )
                metadata = on_loopback(transport.metadata()) if variant is TORCHFT else transport.metadata()
                receiver.say((variant.name, metadata))
                seconds, sums = receiver.receive()
            if sums != [float(tensor.double().sum()) for tensor in tensors_of(state)]:
                raise RuntimeError(f"{variant.name}: expected the sender's state, got another one")
            group.add(variant, RATE, Sample(round_number, num_bytes / seconds / 1e9))
    finally:
        receiver.close()
    group.sort((LINK, *ours, SNAPSHOT, TORCHFT))
    if not torchft_is_installed():
        group.notes.append(NO_TORCHFT)
    group.verdicts = [
        Verdict.at_least(f"{variant.name} / torchft", group.ratio(variant, TORCHFT, RATE), 1.0) for variant in ours
    ]
    sent = ratio(group.find(SNAPSHOT, SEND), group.find(TORCHFT, SEND))
    group.verdicts.append(Verdict.at_most("send_checkpoint, warm arena / torchft", sent, 1.0))


def _device_name() -> str:
    return torch.cuda.get_device_name() if _has_gpu() else "the CPU"


_RUNS: Final = {"training": _train, "moving": _move}


def run(options: Options) -> Iterator[Group]:
    """Measures one after the other."""
    for name in options.states:
        group = Group("gpu", name, "")
        _RUNS[name](group, options)
        yield group


BENCHMARK: Final = Benchmark(
    name="gpu",
    question="What does it cost a model on a GPU?",
    run=run,
    states=tuple(_RUNS),
    default=Size(scale=1.0, num_samples=3),
    misses={
        "pause of a snapshot": "Measured when the host still waited for the copy over PCIe before an optimizer step.",
        "save every": "The writes to disk go on for longer than the ten steps, and use the host's memory and cores.",
    },
)
