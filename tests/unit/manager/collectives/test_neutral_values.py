"""The value of a replica that does not contribute changes the result of no operation."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from manager.collectives.reductions import Reduction

OPERATIONS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


WHOLE = (torch.int64, torch.uint8, torch.bool)
BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
CASES = [
    (operation, dtype)
    for operation in OPERATIONS
    for dtype in (WHOLE if operation in BITWISE else (torch.float32, torch.bfloat16, *WHOLE))
]


@pytest.mark.parametrize(("operation", "dtype"), CASES, ids=str)
def test_it_changes_nothing(operation: ReduceOp.RedOpType, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 5, 100]).to(dtype)
    if dtype.is_signed:
        values = torch.cat([values, -values])
    if dtype.is_floating_point:
        values = torch.cat([values, torch.tensor([torch.inf, -torch.inf], dtype=dtype)])
    neutral = torch.full_like(values, Reduction("", operation).neutral(dtype))
    combined = OPERATIONS[operation](values, neutral)
    assert torch.equal(combined.to(dtype), values)
