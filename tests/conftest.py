"""What surrounds every test: a leak check, and the settings of hypothesis.

A test must leave nothing behind: no live thread, no child process, no open descriptor. What is still there after a
short grace fails it, with a list, and its processes are killed: the next test starts without them. Where there is no
``/proc``, only threads are checked. A library that opens something on first use and keeps it for good is used once
before anything is counted: see the fixtures at the end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_sharer, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from programs import SERVER, fork_writers
from property_examples import num_examples

pytest_plugins = ["pytester"]

# Programs that tests launch find what the tests find.
_ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, (_ROOT, _ROOT / "tests/support", _ROOT / "tests/workers")), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

# torch's threads spin while they wait for each other, and several test processes have more of them than cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's store asks for the name of each address that connects to it, and answers nobody meanwhile; where no DNS knows
# names of the loopback, its resolver would wait for five seconds now and then.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile(
    "small",
    deadline=None,  # a shared machine is slow at times; pytest-timeout bounds the whole test
    derandomize=False,
    max_examples=num_examples(100),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # for the same reason as the deadline
)
settings.load_profile("small")

_MEMORY_DIRECTORY = Path("/dev/shm")
_MEMORY_BYTES = 4 << 30

_POLL_S = 0.02

_IS_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)

# Threads that belong to a pool which lives as long as its owner: asyncio's default executor.
_TOLERATED_THREADS = ("asyncio_",)

# Files that libraries open when they are first used and then keep.
_TOLERATED_FILES = (sys.prefix, sys.base_prefix, "/usr/", "/dev/urandom", "/dev/nvidia")


def pytest_addoption(parser: pytest.Parser) -> None:
    # gloo waits five times the timeout for a member that has left while they connected.
    parser.addini("leak_grace_s", "seconds for which leftovers of a test may still go away", default="30")
    parser.addoption("--marked", metavar="NAME", help="read no file of tests that does not mention this mark: for -m")


def pytest_configure() -> None:
    """Puts temporary directories into memory if there is room, where a sync costs nothing; a death loses no more.

    A shell's ``&`` and ``nohup`` start pytest with Ctrl-C ignored, which programs that tests start would inherit.
    """
    for ignored, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, usual)
    if _MEMORY_DIRECTORY.is_dir() and shutil.disk_usage(_MEMORY_DIRECTORY).free > _MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY_DIRECTORY))


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        # A dummy stands for a thread that Python did not start (torch's autograd and OpenMP pools).
        if isinstance(thread, threading._DummyThread) or thread.name.startswith(_TOLERATED_THREADS):
            continue
        yield f"thread {thread.name!r} (native id {thread.native_id}{', daemon' if thread.daemon else ''})"


def _children(parent: int) -> set[int]:
    """Reads until two answers agree: the kernel may leave one out while another ends."""
    found: set[int] | None = None
    while True:
        seen = set()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                seen.update(map(int, path.read_text().split()))
        if seen == found:
            return seen
        found = seen


def _processes() -> Iterator[str]:
    # What the server of programs has forked is this process's as well; the server stays.
    server = {SERVER.process.pid} if SERVER.process is not None else set()
    for parent in {os.getpid()} | server:
        for child in _children(parent) - server:
            with contextlib.suppress(OSError):  # it has ended in the meantime
                head = Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[0]
                yield f"process {head})"


def _descriptors() -> Iterator[str]:
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(entry)
        except OSError:  # the one that listed the folder
            continue
        if not target.startswith(_TOLERATED_FILES) and target != SERVER.descriptor():
            yield f"descriptor {target}"


def _kill(leaked: Counter[str]) -> None:
    for what in leaked:
        kind, number, *_ = what.split()
        if kind == "process":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # the server of programs waits for its own
                os.waitpid(int(number), 0)


def _alive() -> Counter[str]:
    return Counter([*_threads(), *_processes(), *_descriptors()])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has xdist keep together the tests of a file that share a fixture, and no others: files differ much in length."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.partition("::")[0]
            return name if _shares_a_fixture(name) else nodeid

    return Scheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out what ``--marked`` says, and files that are slow as a whole: to import all takes 15 seconds."""
    if collection_path.match("test_*.py"):
        mark, content = config.getoption("--marked"), collection_path.read_text()
        if mark and f"mark.{mark}" not in content:
            return True
        if "not slow" in config.option.markexpr and _IS_SLOW.search(content):
            return True
    return None  # nobody else is kept from ignoring it


def pytest_collection() -> None:
    """Spares the search for garbage among ever more tests, where there is none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leaves what lives as long as the run, every module and test, out of each search for garbage."""
    gc.freeze()
    gc.enable()


@functools.cache
def _shares_a_fixture(name: str) -> bool:
    text = (_ROOT / name).read_text()
    return 'scope="module"' in text or 'scope="class"' in text


@pytest.fixture(scope="session", autouse=True)
def _helper_processes() -> None:
    """Starts what multiprocessing starts once and keeps, so that it is no test's leak."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _forked_writers() -> None:
    """Checkpoint stores fork their writers, unless a test says `programs.start_writers`."""
    if "ft_transport.checkpoint.writer_process" in sys.modules:
        fork_writers()


@pytest.fixture(autouse=True)
def _leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        import torch  # here and below: only a run that needs torch waits for its import

        if torch.cuda.is_available():  # the driver opens descriptors of its own on first use
            torch.zeros(1, device="cuda")
    before = _alive()
    yield
    recorder = sys.modules.get("ft_transport.telemetry.recorder")
    if recorder is not None and (recording := recorder.current()) is not None:
        recording.leave()  # Else each record of the tests that follow would be a part of it.
        pytest.fail("the test left a recording open", pytrace=False)
    deadline = time.monotonic() + float(request.config.getini("leak_grace_s"))
    if _alive() - before:
        resource_sharer.stop()  # one thread and socket, started when a tensor is first sent to another process
    while (leaked := _alive() - before) and time.monotonic() < deadline:
        # Cycles may hold what the test let go of, also after a thread that still ran has ended. An object that was
        # never closed still fails, by its ResourceWarning.
        gc.collect()
        time.sleep(_POLL_S)
    if leaked:
        _kill(leaked)
        lines = [f"  {what}" + (f" ×{count}" if count > 1 else "") for what, count in sorted(leaked.items())]
        pytest.fail("\n".join(["left behind by the test:", *lines]), pytrace=False)


@pytest.fixture(scope="session")
def one_rank_group() -> Iterator[None]:
    """A gloo group of one rank, for a test that uses DTensor or collectives in this process.

    It lives for the whole session because DTensor's caches keep the meshes they saw, and with them the group's sockets.
    A test that needs a group of its own, or none, runs in a process of its own.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, is_master=True), rank=0, world_size=1)
    distribute_tensor(torch.zeros(1), init_device_mesh("cpu", (1,)), [Shard(0)]).full_tensor()
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def quorum_ready(torchft_ready: None) -> None:
    """For a test with a quorum in this process: autograd and gloo keep a pipe and threads from their first use on."""
    from quorum_threads import lighthouse, make_manager, run_replicas

    def train(address: str, name: str) -> None:
        import torch

        manager = make_manager(address, name, min_replica_size=2, has_part=True)
        manager.start_quorum()
        weight = torch.ones(1, requires_grad=True)
        weight.square().backward()
        assert weight.grad is not None
        manager.allreduce(weight.grad).wait()
        assert manager.should_commit()
        manager.shutdown()

    with lighthouse(min_replicas=2) as address:
        run_replicas(lambda: train(address, "a"), lambda: train(address, "b"))


@pytest.fixture(scope="session")
def obstore_ready() -> None:
    """For a test that uses obstore in this process: its runtime keeps descriptors from the first request on."""
    import obstore
    from obstore.store import MemoryStore

    obstore.put(MemoryStore(), "first", b"")


@pytest.fixture(scope="session")
def torchft_ready() -> None:
    """For a test that uses torchft in this process: its runtime keeps a pair of sockets. Skips where it is missing."""
    coordination = pytest.importorskip("torchft.coordination")
    coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1).shutdown()
