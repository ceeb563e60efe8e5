"""Whatever members reduce, and however fast: no collective has two sizes, and all of them take the same turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from ft_transport.runtime.threads import SafeExecutor
from manager.collectives.reduction_sequence import ReductionSequence
from manager.collectives.reductions import Reduction
from manager.errors import ReductionMismatchError

_TIMEOUT_S = 20.0
_NAMES = ("", "weight", "bias")
_SIZES = (1, 3)


class Meeting:
    """Stands in for gloo between threads: it fails where gloo would end the process, for tensors of other sizes."""

    def __init__(self, num_members: int) -> None:
        self._barrier = threading.Barrier(num_members)
        self.sent: list[Any] = [None] * num_members

    def exchange(self, rank: int, kind: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sent[rank] = (kind, tensor.clone())
        self._barrier.wait(_TIMEOUT_S)
        found = list(self.sent)
        assert len({(each[0], each[1].dtype, each[1].shape) for each in found}) == 1, found
        self._barrier.wait(_TIMEOUT_S)
        return [each[1] for each in found]

    def abort(self) -> None:
        self._barrier.abort()


class Done:
    def wait(self) -> bool:
        return True


class Member:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Done:
        found = torch.stack(self._meeting.exchange(self._rank, str(opts.reduceOp == ReduceOp.MAX), tensors[0]))
        tensors[0].copy_(found.amax(0) if opts.reduceOp == ReduceOp.MAX else found.sum(0))
        return Done()

    def allgather(self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any) -> Done:
        for own, found in zip(
            output_tensors[0], self._meeting.exchange(self._rank, "gather", input_tensors[0]), strict=True
        ):
            own.copy_(found)
        return Done()

    def abort(self) -> None:
        self._meeting.abort()


@contextmanager
def sequences(num_members: int) -> Iterator[list[ReductionSequence]]:
    meeting = Meeting(num_members)
    executors = [SafeExecutor(1, f"member-{rank}") for rank in range(num_members)]
    names = tuple(f"replica_{rank}" for rank in range(num_members))
    try:
        yield [
            ReductionSequence(Member(meeting, rank), names, timeout=timedelta(seconds=_TIMEOUT_S), executor=executor)
            for rank, executor in enumerate(executors)
        ]
    finally:
        for executor in executors:
            executor.shutdown()


def first_difference(plans: Sequence[Sequence[tuple[str, int, bool]]]) -> int | None:
    """The position where the plans part; one without a name may stand for any."""
    for position in range(max(map(len, plans))):
        at = [plan[position] if position < len(plan) else None for plan in plans]
        known = [each for each in at if each is not None]
        if len(known) < len(at) or len({each[1] for each in known}) > 1 or len({each[0] for each in known} - {""}) > 1:
            return position
    return None


one = st.tuples(st.sampled_from(_NAMES), st.sampled_from(_SIZES), st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> list[list[tuple[str, int, bool]]]:
    """One plan for all, and for some a change in it. The last value says whether a member waits there."""
    common = draw(st.lists(one, max_size=8))
    found = [list(common) for _ in range(draw(st.integers(2, 4)))]
    for plan in found:
        for index, (name, size, _) in enumerate(plan):
            plan[index] = (name, size, draw(st.booleans()))
        match draw(st.sampled_from(("same", "same", "cut", "longer", "other"))):
            case "cut":
                del plan[draw(st.integers(0, len(plan))) :]
            case "longer":
                plan.append(draw(one))
            case "other" if plan:
                plan[draw(st.integers(0, len(plan) - 1))] = draw(one)
            case _:
                pass
    return found


@given(plans())
def test_all_members_reduce_alike_or_fail_alike(plans: list[list[tuple[str, int, bool]]]) -> None:
    def member(rank: int, sequence: ReductionSequence) -> ReductionMismatchError | list[float]:
        tensors = []
        try:
            for name, size, does_wait in plans[rank]:
                tensors.append(torch.full((size,), float(rank + 1)))
                work = sequence.add(Reduction(name, ReduceOp.SUM), tensors[-1])
                if does_wait:
                    work.wait()
            sequence.end()
            sequence.wait_for_end()
        except ReductionMismatchError as error:
            return error
        return [float(each.mean()) for each in tensors]

    with sequences(len(plans)) as made, ThreadPoolExecutor(len(plans)) as pool:
        outcomes = [each.result(_TIMEOUT_S) for each in [pool.submit(member, *each) for each in enumerate(made)]]
    position = first_difference(plans)
    if position is None:
        assert outcomes == [[float(sum(range(1, len(plans) + 1)))] * len(plans[0])] * len(plans)
    else:
        # A member that did not get as far as the difference has nothing to compare.
        assert all(isinstance(each, ReductionMismatchError) for each in outcomes), outcomes
        assert {(each.position, each.reductions) for each in outcomes if isinstance(each, ReductionMismatchError)} == {
            (position, outcomes[0].reductions)  # type: ignore[union-attr]
        }
