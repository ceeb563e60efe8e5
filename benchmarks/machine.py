"""What the figures were measured on, and whether the machine was doing something else meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.report import Sample
from ft_transport.state.prefaulted import available_bytes

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_QUIET_SHARE: Final = 0.05
_QUIET_WINDOW_S: Final = 0.25
_NUM_QUIET_WINDOWS: Final = 4
_SPARE_BYTES: Final = 1 << 30
# From malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MAX_INT: Final = (1 << 31) - 1
_MAX_MMAP_THRESHOLD_BYTES: Final = 32 << 20
_KERNEL: Final = 2
"""Parent of all threads of the kernel, some of which write to the disk what a benchmark has written."""
_IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_SHORTEST_WINDOW_S: Final = 0.1
"""The kernel counts in ticks of 10 ms: over less than this, one foreign tick would look like a busy machine."""


def describe() -> dict[str, object]:
    """The machine and the software, for the report."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchft", "aiohttp", "xxhash")},
        "load_1_5_15_min": list(os.getloadavg()),
    }


@dataclass(frozen=True, slots=True)
class _Ticks:
    """CPU time so far: of all processes, of ours, and what the hypervisor took away."""

    everybody: int
    ours: int
    stolen: int


class Watch:
    """Times a ``with`` block, and the share of the cores that other processes took meanwhile.

    Args:
        process_ids: The processes that belong to the measurement.

    Attributes:
        seconds: The duration of the block.
        others_share: 0 to 1, of all cores; ``None`` if the system does not tell or the block was too short.
    """

    def __init__(self, process_ids: Sequence[int]) -> None:
        self._process_ids = process_ids
        self.seconds = 0.0
        self.others_share: float | None = None

    def __enter__(self) -> Watch:
        self._begun = self._read()
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_error: object) -> None:
        self.seconds = self.elapsed_s()
        self.others_share = self._share(self._begun, self._read())

    def elapsed_s(self) -> float:
        """The time since the block began."""
        return time.perf_counter() - self._started_s

    def sample(self, round_number: int, value: float) -> Sample:
        return Sample(round_number, value, self.others_share)

    def _share(self, begun: _Ticks | None, end: _Ticks | None) -> float | None:
        if begun is None or end is None or self.seconds < _SHORTEST_WINDOW_S:
            return None
        others = max(0, (end.everybody - begun.everybody) - (end.ours - begun.ours)) + (end.stolen - begun.stolen)
        return others / (self.seconds * _TICKS_PER_S * (os.cpu_count() or 1))

    def _read(self) -> _Ticks | None:
        try:
            # man 5 proc: user nice system idle iowait irq softirq steal. Interrupts are left out: those of the
            # loopback device belong to the measurement, whichever process runs when they come.
            fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
            ours = sum(_process_ticks(process_id) for process_id in self._process_ids)
        except (OSError, ValueError):
            return None
        return _Ticks(everybody=sum(fields[:3]), ours=ours, stolen=fields[7])


def processor_wait_s() -> float:
    """For how long this thread could have run and got no processor so far; 0 where the kernel does not tell.

    Source: ``/proc/<pid>/schedstat`` (Linux, Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def stolen_s() -> float:
    """For how long all processors of this machine were taken away by its host so far; 0 where that is not told.

    Source: ``steal`` of ``/proc/stat`` (Linux, Documentation/filesystems/proc.rst), in ticks.
    """
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def wait_until_quiet(limit_s: float) -> None:
    """Sleeps until others leave the cores alone for a second, at most ``limit_s`` (0: returns at once)."""
    give_up_s = time.monotonic() + limit_s
    num_quiet = 0
    while num_quiet < _NUM_QUIET_WINDOWS and time.monotonic() < give_up_s:
        with Watch([os.getpid()]) as watch:
            time.sleep(_QUIET_WINDOW_S)
        num_quiet = 0 if (watch.others_share or 0.0) > _QUIET_SHARE else num_quiet + 1


def own_processes() -> list[int]:
    """This process, all that descend from it, and the kernel's threads."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while found := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= found
    return [*ours, *(child for child, parent in parents.items() if parent == _KERNEL)]


def file_system_of(directory: Path) -> str:
    """The type of the file system that a directory is on, ``unknown`` where it cannot be told."""
    best = ("", "unknown")
    try:
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mounted, kind, *_ = line.split()
            at = mounted.encode().decode("unicode_escape")
            # Of several on one place, the last one hides the others.
            if directory.resolve().is_relative_to(at) and len(at) >= len(best[0]):
                best = (at, kind)
    except (OSError, ValueError):
        return "unknown"
    return best[1]


def is_on_disk(directory: Path) -> bool:
    """Whether what is written there is written to a disk."""
    return file_system_of(directory) not in _IN_MEMORY


@dataclass(frozen=True)
class PeakMemory:
    """A process's resident memory now, against which ``growth_bytes`` later gives the peak."""

    baseline_bytes: int

    @classmethod
    def start(cls) -> PeakMemory | None:
        """Forgets earlier peaks; ``None`` where the kernel cannot."""
        try:
            # What the allocator still holds from building the state could be reused unnoticed.
            return_free_memory()
            Path("/proc/self/clear_refs").write_text("5")
            return cls(_status_bytes("VmRSS"))
        except (OSError, ValueError):
            return None

    def growth_bytes(self) -> int:
        return max(0, _status_bytes("VmHWM") - self.baseline_bytes)


def return_free_memory() -> None:
    """Makes the allocator give back what it holds free, where it can be asked to (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_free_memory() -> None:
    """Makes the allocator keep what is freed, where it can be told to (glibc).

    It would else return the temporaries of a large optimizer step to the kernel, or not, by which small block happens
    to lie above them; the page faults then take as long as the step.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _MAX_INT)
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)


def back_free_memory(num_bytes: int) -> None:
    """Takes ``num_bytes`` of memory, fills it and gives it back.

    A virtual machine's memory may be the host's to find at the first touch, which was measured to take five times as
    long as the guest's own part of a page fault. What is free but was in use a moment ago is there already, as it
    always is on a machine of one's own.
    """
    num_bytes = min(num_bytes, (available_bytes() or 0) - _SPARE_BYTES)
    if num_bytes <= 0:
        return
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        block = bytes(1 << 20)
        for start in range(0, num_bytes, len(block)):
            memory[start : start + len(block)] = block[: num_bytes - start]


@contextlib.contextmanager
def busy_interpreter() -> Iterator[None]:
    """A thread that computes in Python and never waits."""
    stopping = threading.Event()

    def compute() -> None:
        number = 0
        while not stopping.is_set():
            for _ in range(1000):
                number = (number * 5 + 1) % 1009

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _process_ticks(process_id: int) -> int:
    # The name, in brackets, may hold spaces.
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {name}")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
