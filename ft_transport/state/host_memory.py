"""The memory that this process may still allocate without an out-of-memory kill."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the minimum of free memory over the machine and this process's control groups; ``None`` if unknown.

    Droppable memory of files counts as free. Sources: ``MemAvailable`` (man 5 proc_meminfo), ``memory.max``
    and ``memory.current`` (Linux, Documentation/admin-guide/cgroup-v2.rst), ``memory.limit_in_bytes`` and
    ``memory.usage_in_bytes`` (cgroup-v1/memory.rst).

    Args:
        proc: Mount point of procfs.
        cgroups: Mount point of the control groups.
    """
    found = [_field(proc / "meminfo", "MemAvailable:", unit=1024)]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            found += _groups_left(cgroups, path, limit="memory.max", usage="memory.current", prefix="")
        elif "memory" in controllers.split(","):
            found += _groups_left(
                cgroups / "memory",
                path,
                limit="memory.limit_in_bytes",
                usage="memory.usage_in_bytes",
                prefix="total_",
            )
    known = [number for number in found if number is not None]
    return max(0, min(known)) if known else None


def _groups_left(root: Path, path: str, *, limit: str, usage: str, prefix: str) -> list[int | None]:
    """Return the free memory of each group from ``path`` up to the root. In a container the path may not exist."""
    group = root / path.lstrip("/")
    left: list[int | None] = []
    while True:
        limit_bytes, usage_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is not None and usage_bytes is not None:
            files = [_field(group / "memory.stat", f"{prefix}{kind}_file") or 0 for kind in ("inactive", "active")]
            left.append(limit_bytes - usage_bytes + sum(files))
        if group == root or root not in group.parents:
            return left
        group = group.parent


def _number(path: Path) -> int | None:
    """Return the number in a file; ``None`` without a file, or for a word (``max``)."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _field(path: Path, name: str, *, unit: int = 1) -> int | None:
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeError):
        return []
