"""Memory at an address is read and written, and costs nothing for each length that it has been looked at with."""

from __future__ import annotations

import sys

import pytest
import torch

from ft_transport.state.raw_memory import bytes_at


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
    with pytest.raises(ValueError, match="expected an address of 8 bytes"):
        bytes_at(address, 8)
