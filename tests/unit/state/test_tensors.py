"""Memory at an address, as bytes."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from ft_transport.state.tensors import bytes_at, read_only_positions


def test_a_part_of_a_tensor_is_read_and_written() -> None:
    tensor = torch.arange(16, dtype=torch.uint8)
    view = bytes_at(tensor.data_ptr() + 4, 8)
    assert (view.format, view.itemsize, view.readonly, bytes(view)) == ("B", 1, False, bytes(range(4, 12)))
    view[0] = 99
    assert tensor[4] == 99


def test_no_bytes_need_no_address() -> None:
    assert bytes_at(0, 0) == b""


def test_no_length_leaves_anything_behind() -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8)
    bytes_at(tensor.data_ptr(), 1)
    before = sys.getallocatedblocks()
    for num_bytes in range(1, 4097):
        bytes_at(tensor.data_ptr(), num_bytes)
    assert sys.getallocatedblocks() - before < 1000


@pytest.mark.parametrize("address", [0, -1, -4096, sys.maxsize - 4, sys.maxsize, 2**64 - 8])
def test_where_no_memory_can_be_is_an_error(address: int) -> None:
    with pytest.raises(ValueError, match="expected the address of a memory block of 8 bytes"):
        bytes_at(address, 8)


def _mapped(num_bytes: int, protection: int) -> int:
    """The address of an anonymous mapping that stays for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address: int = libc.mmap(None, num_bytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    return address


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list mappings")
def test_ranges_that_touch_a_mapping_for_reading_alone_are_found() -> None:
    page = mmap.PAGESIZE
    start = _mapped(5 * page, mmap.PROT_READ | mmap.PROT_WRITE)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(start + 2 * page), page, mmap.PROT_READ) == 0
    ranges = {
        "before": (start, start + 2 * page),
        "its first byte": (start + page, start + 2 * page + 1),
        "inside": (start + 2 * page + 8, start + 2 * page + 16),
        "its last byte": (start + 3 * page - 1, start + 4 * page),
        "behind": (start + 3 * page, start + 5 * page),
        "around": (start, start + 5 * page),
        "nothing": (0, 0),
    }
    starts, ends = np.array(list(ranges.values())).T
    found = read_only_positions(starts, ends)
    assert [list(ranges)[position] for position in found] == ["its first byte", "inside", "its last byte", "around"]
