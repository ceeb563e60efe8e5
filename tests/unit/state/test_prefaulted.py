"""Memory is resident before its first use, with huge pages, and never more than the host has."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from state_equality import exact

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.state import prefaulted as module
from ft_transport.state.prefaulted import PrefaultedMemory, available_bytes, huge_page_bytes, make_resident, map_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")

_NUM_BYTES = 7 << 20
"""Three huge pages of 2 MiB, and a rest."""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("ft-transport-test")
    os.ftruncate(made, _NUM_BYTES)
    yield made
    os.close(made)


def _mapped(address: int) -> dict[str, int]:
    """What the system says of the mapping that begins there, in bytes; empty if there is none."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    found: dict[str, int] = {}
    for line in lines:
        entry = re.fullmatch(r"(\w+): +(\d+) kB", line)
        if entry is None:
            break
        found[entry[1]] = int(entry[2]) * 1024
    return found


def _made(descriptor: int) -> torch.Tensor:
    data = torch.frombuffer(map_file(descriptor, _NUM_BYTES, offset=0), dtype=torch.uint8)
    make_resident(data.data_ptr(), _NUM_BYTES, is_wanted=lambda: True, rest=None)
    return data


def _collapses() -> bool:
    """Whether this kernel makes huge pages of a memory file for a process that asks for them."""
    version = tuple(int(number) for number in platform.release().split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return bool(huge_page_bytes()) and version >= (6, 1) and "[deny]" not in setting.read_text()


@pytest.mark.skipif(not _collapses(), reason="this kernel gives a memory file no huge pages")
def test_it_is_in_huge_pages_as_far_as_they_fit(descriptor: int) -> None:
    data = _made(descriptor)
    mapped = _mapped(data.data_ptr())
    assert mapped["Rss"] == _NUM_BYTES
    assert mapped["ShmemPmdMapped"] == _NUM_BYTES // huge_page_bytes() * huge_page_bytes()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_without_huge_pages_it_is_resident_all_the_same(
    descriptor: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    advise, num_refused = module._advise, 0

    def refuse(address: int, num_bytes: int, advice: int) -> None:
        nonlocal num_refused
        if advice == module._MADV_COLLAPSE:
            num_refused += 1
            raise OSError(number, os.strerror(number))
        advise(address, num_bytes, advice)

    monkeypatch.setattr(module, "_advise", refuse)
    monkeypatch.setattr(module, "_PIECE_BYTES", 4 << 20)
    data = _made(descriptor)
    assert _mapped(data.data_ptr())["Rss"] == _NUM_BYTES
    # A page that was busy says nothing of the next one; a kernel that has none is not asked again.
    assert num_refused == (2 if number == errno.EAGAIN else 1)


def test_it_holds_zeros_and_then_what_is_written(descriptor: int) -> None:
    data = _made(descriptor)
    assert not data.any()
    data[-1] = 7
    data[3 << 20] = 5
    assert os.pread(descriptor, 1, _NUM_BYTES - 1) == b"\7"
    assert os.pread(descriptor, 1, 3 << 20) == b"\5"


def test_it_is_unmapped_when_the_last_that_looks_into_it_is_gone(descriptor: int) -> None:
    data = _made(descriptor)
    address, part = data.data_ptr(), data[5 << 20 :]
    del data
    gc.collect()
    assert _mapped(address)
    assert not part.any()
    del part
    assert not _mapped(address)


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(descriptor: int) -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(10):
        with pytest.raises(OSError, match="Bad file descriptor"):
            map_file(1 << 20, _NUM_BYTES, offset=0)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 2


MEMINFO = "MemTotal:       24000 kB\nMemFree:          100 kB\nMemAvailable:   20000 kB\n"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        pytest.param("", {}, 20_480_000, id="no groups"),
        pytest.param("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 20_480_000, id="no limit"),
        pytest.param("0::/\n", {"memory.max": "9000\n", "memory.current": "5000\n"}, 4000, id="a container's own"),
        pytest.param(
            "0::/\n",
            {
                "memory.max": "9000\n",
                "memory.current": "5000\n",
                "memory.stat": "anon 7\ninactive_file 1500\nactive_file 200\n",
            },
            5700,
            id="files that can be dropped",
        ),
        pytest.param(
            "0::/jobs/one\n",
            {
                "jobs/memory.max": "7000\n",
                "jobs/memory.current": "6500\n",
                "jobs/one/memory.max": "9000\n",
                "jobs/one/memory.current": "1000\n",
            },
            500,
            id="a group around it",
        ),
        pytest.param(
            "3:cpu:/x\n5:memory,other:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "9000\n",
                "memory/job/memory.usage_in_bytes": "2000\n",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50\n",
            },
            7350,
            id="version 1",
        ),
        pytest.param("0::/\n", {"memory.max": "9\n", "memory.current": "50\n"}, 0, id="more taken than allowed"),
        pytest.param("rubbish\n\n0::/../..\n", {"memory.max": "x\n"}, 20_480_000, id="nothing to be understood"),
    ],
)
def test_the_least_of_all_counts(tmp_path: Path, cgroup: str, groups: dict[str, str], expected: int) -> None:
    proc = _write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": cgroup})
    assert available_bytes(proc, _write(tmp_path / "cgroups", groups)) == expected


def test_where_nobody_tells_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    assert (available_bytes() or 0) > 0, "this machine has some"


MIB = 1 << 20
LONG = timedelta(seconds=20)


@pytest.mark.parametrize("available", [3 * MIB, 0])
def test_memory_that_the_machine_needs_is_left_alone(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: available)
    prefaulted = PrefaultedMemory()
    prefaulted.prepare(2 * MIB)
    assert prefaulted.take(1) is None


def test_what_was_made_ready_is_taken_once_and_too_little_of_it_is_better_than_none() -> None:
    prefaulted = PrefaultedMemory()
    prefaulted.prepare(2 * MIB)
    cut_to_size = prefaulted.take(MIB)
    assert cut_to_size is not None
    assert len(cut_to_size) == MIB
    assert prefaulted.take(1) is None
    before = _resident_bytes()
    prefaulted.prepare(64 * MIB)
    block = prefaulted.take(66 * MIB)
    assert block is not None
    assert len(block) == 66 * MIB
    assert _resident_bytes() - before > 48 * MIB
    assert prefaulted.take(1) is None


def test_where_a_mapping_cannot_grow_too_little_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rigid(mmap.mmap):
        def resize(self, newsize: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    monkeypatch.setattr(module, "new_block", lambda num_bytes: Rigid(-1, num_bytes))
    prefaulted = PrefaultedMemory()
    prefaulted.prepare(MIB)
    assert prefaulted.take(2 * MIB) is None
    assert prefaulted.take(1) is None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.fixture
def transports() -> Iterator[list[HTTPTransport[Any]]]:
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    made: list[HTTPTransport[Any]] = [HTTPTransport(LONG, settings=settings) for _ in range(2)]
    yield made
    for transport in made:
        transport.shutdown()


def test_it_is_resident_and_a_state_is_received_into_it(transports: list[HTTPTransport[Any]]) -> None:
    sender, receiver = transports
    state = {"w": torch.randn(16 * MIB // 4)}
    sender.send_checkpoint([1], 1, state, LONG)
    before = _resident_bytes()
    receiver.prefault_receive(64 * MIB)
    assert _resident_bytes() - before > 48 * MIB
    received = receiver.fetch(sender.metadata(), 1, timeout=LONG)
    assert exact(received.state) == exact(state)
    assert receiver._client.prefaulted.take(1) is None
