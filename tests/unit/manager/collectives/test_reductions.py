"""What a replica says of its reductions: the same for the same ones, and for no others."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from manager.collectives.reduction_sequence import Announcement, is_cut_short
from manager.collectives.reductions import Digest, ReducedTensor, Reduction, ReductionLog
from manager.errors import UnfinishedReductionError

SIZE = torch.Size([2, 3])


def log_of(*reductions: tuple[Reduction, torch.Tensor]) -> ReductionLog:
    log = ReductionLog()
    for reduction, tensor in reductions:
        log.add(reduction, tensor)
    return log


def average(name: str = "weight", parts: tuple[tuple[str, torch.Size], ...] = ()) -> Reduction:
    return Reduction(name, ReduceOp.AVG, parts)


@pytest.mark.parametrize(
    "other",
    [
        log_of((average(), torch.ones(3, 2))),
        log_of((average(), torch.ones(2, 3, dtype=torch.float64))),
        log_of((Reduction("weight", ReduceOp.SUM), torch.ones(2, 3))),
        log_of((average(parts=(("part", SIZE),)), torch.ones(2, 3))),
    ],
    ids=["shape", "dtype", "operation", "parts"],
)
def test_other_forms_have_other_digests(other: ReductionLog) -> None:
    own = log_of((average(), torch.ones(2, 3)))
    again = log_of((average(), torch.zeros(2, 3)))
    assert own.digest(1) == again.digest(1)
    assert own.digest(1).forms != other.digest(len(other)).forms


def test_other_names_have_other_digests_beside_the_same_forms() -> None:
    own, other = log_of((average(), torch.ones(2))), log_of((average("bias"), torch.ones(2)))
    assert own.digest(1).forms == other.digest(1).forms
    assert own.digest(1).names != other.digest(1).names
    assert own.names(0, 1) != other.names(0, 1)
    assert log_of((average(""), torch.ones(2))).names(0, 1) == [0]


def test_a_digest_of_fewer_entries_is_that_of_a_shorter_log() -> None:
    first, second = (average("a"), torch.ones(2)), (average("b"), torch.ones(3))
    log = log_of(first, second)
    whole = log.digest(2)
    assert log.digest(1) == log_of(first).digest(1)
    assert log.digest(2) == whole
    assert log.describe(1) == "b float32[3] avg"
    assert log.describe(2) == "nothing further"


def test_an_operation_has_one_name_however_it_is_given() -> None:
    assert Reduction("", ReduceOp.MAX).operation == "max"
    # As torch.distributed.all_reduce makes it.
    assert Reduction("", ReduceOp(ReduceOp.AVG)).operation == "avg"
    assert Reduction("", ReduceOp(ReduceOp.AVG)).is_average


def test_an_announcement_survives_its_bytes() -> None:
    announcement = Announcement(3, True, Digest(b"12345678", b"abcdefgh"))
    assert Announcement.decode(announcement.encode()) == announcement


def test_a_member_that_ended_with_fewer_cuts_the_step_short() -> None:
    def announced(num: int, is_last: bool) -> Announcement:
        return Announcement(num, is_last, Digest(b"", b""))

    assert not is_cut_short([announced(2, False), announced(3, True)])
    assert is_cut_short([announced(2, True), announced(3, False)])
    assert not is_cut_short([announced(2, True), announced(2, False)])


def test_a_sum_is_divided_unless_something_has_touched_the_tensor() -> None:
    tensor = torch.full((2,), 6.0)
    reduced = ReducedTensor(tensor, tensor, None)
    reduced.check()
    reduced.divide(3)
    assert tensor.tolist() == [2.0, 2.0]
    reduced = ReducedTensor(tensor, tensor, None)
    tensor.mul_(2)
    with pytest.raises(UnfinishedReductionError, match=r"a tensor of shape \[2\] to stay as it is, but it was changed"):
        reduced.check()
    reduced = ReducedTensor(tensor, tensor, None)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnfinishedReductionError, match="it was freed"):
        reduced.check()


def test_a_tensor_that_counts_no_changes_is_reduced_all_the_same() -> None:
    with torch.inference_mode():
        tensor = torch.full((2,), 6.0)
        ReducedTensor(tensor, tensor, None).check()
