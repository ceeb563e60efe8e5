"""What the figures were measured on, and whether the machine was doing something else meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ft_transport.state.host_memory import available_bytes

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE: Final = 0.1
"""Above this share of the cores, taken by others, a sample is marked."""
_QUIET_SHARE: Final = 0.05
_QUIET_WINDOW_S: Final = 0.25
_NUM_QUIET_WINDOWS: Final = 4
_SPARE_BYTES: Final = 1 << 30
# From malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MAX_INT: Final = (1 << 31) - 1
_MAX_MMAP_THRESHOLD_BYTES: Final = 32 << 20
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


@dataclass(frozen=True)
class _Ticks:
    """CPU time so far: of everybody, of ours, and what the hypervisor took away."""

    wall_s: float
    everybody: int
    ours: int
    stolen: int


class Watch:
    """Measures what share of the cores others took between ``start`` and ``stop``.

    Args:
        process_ids: The processes that belong to the measurement.
    """

    def __init__(self, process_ids: Sequence[int]) -> None:
        self._process_ids = process_ids
        self._begun: _Ticks | None = None

    def start(self) -> None:
        self._begun = self._read()

    def stop(self) -> float | None:
        """The others' share of all cores, 0 to 1; ``None`` if the system does not tell or too little time passed."""
        end, begun = self._read(), self._begun
        if end is None or begun is None or end.wall_s - begun.wall_s < _SHORTEST_WINDOW_S:
            return None
        others = max(0, (end.everybody - begun.everybody) - (end.ours - begun.ours)) + (end.stolen - begun.stolen)
        return others / ((end.wall_s - begun.wall_s) * _TICKS_PER_S * (os.cpu_count() or 1))

    def _read(self) -> _Ticks | None:
        try:
            # man 5 proc: user nice system idle iowait irq softirq steal. Interrupts are left out: those of the
            # loopback device belong to the measurement, whoever is running when they come.
            fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
            ours = sum(_process_ticks(process_id) for process_id in self._process_ids)
        except (OSError, ValueError):
            return None
        return _Ticks(wall_s=time.monotonic(), everybody=sum(fields[:3]), ours=ours, stolen=fields[7])


def is_busy(others_share: float | None) -> bool:
    """Whether a sample has to be marked."""
    return others_share is not None and others_share > _BUSY_SHARE


def wait_until_quiet(limit_s: float) -> None:
    """Sleeps until others leave the cores alone for a second, at most ``limit_s`` (0: returns at once)."""
    give_up_s = time.monotonic() + limit_s
    num_quiet = 0
    while num_quiet < _NUM_QUIET_WINDOWS and time.monotonic() < give_up_s:
        watch = Watch([os.getpid()])
        watch.start()
        time.sleep(_QUIET_WINDOW_S)
        others_share = watch.stop()
        num_quiet = 0 if others_share is not None and others_share > _QUIET_SHARE else num_quiet + 1


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
