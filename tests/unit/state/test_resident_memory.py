"""Memory files are resident before they are used, in huge pages where there are some, and unmapped in the end."""

from __future__ import annotations

import errno
import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ft_transport.state import resident_memory as module
from ft_transport.state.resident_memory import huge_page_bytes, make_resident, map_file

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
