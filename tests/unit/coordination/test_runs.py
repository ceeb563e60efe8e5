"""The ranks of a run agree on a part of the store that no earlier run has used, in whatever order they begin."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from keepers import wait_until
from torch.distributed import HashStore

from ft_transport import RankGoneError
from ft_transport.coordination.runs import RunStore

LONG = timedelta(seconds=30)


def owner() -> str:
    """The process group exists."""
    return "group"


def value_of(run: RunStore, value: str) -> str:
    """The value of a key that the first caller of this run sets."""
    store: Any = run.store("part", LONG)
    return bytes(store.compare_set("key", "", value)).decode()


def all_have_heard() -> None:
    wait_until(lambda: not any(each.name == "ft-transport-run" for each in threading.enumerate()))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_no_run_reads_what_an_earlier_one_wrote(order: tuple[int, ...]) -> None:
    shared = HashStore()
    for number in range(3):
        with ThreadPoolExecutor(3) as pool:
            # Each begins before the next: the others wait for the first rank, and never take the earlier run's part.
            asked = []
            for rank in order:
                run = RunStore(shared, rank, 3, owner)
                asked.append(pool.submit(value_of, run, f"run {number}"))
            assert {each.result(30) for each in asked} == {f"run {number}"}
        all_have_heard()  # the first rank of a run is dead when the next run begins


def test_a_rank_of_an_earlier_run_that_never_heard_does_not_disturb() -> None:
    shared = HashStore()
    with pytest.raises(RankGoneError, match=r"rank 0 of this group to begin within 0\.05 s"):
        RunStore(shared, 1, 2, owner).store("part", timedelta(seconds=0.05))
    first, second = RunStore(shared, 0, 2, owner), RunStore(shared, 1, 2, owner)
    assert value_of(second, "second") == value_of(first, "first") == "second"
    all_have_heard()


def test_a_rank_that_gave_up_may_ask_again() -> None:
    shared = HashStore()
    run = RunStore(shared, 1, 2, owner)
    with pytest.raises(RankGoneError):
        run.store("part", timedelta(0))
    first = RunStore(shared, 0, 2, owner)
    assert value_of(run, "a") == value_of(first, "b") == "a"
    all_have_heard()


def test_a_store_that_is_gone_is_named() -> None:
    class Gone:
        def add(self, *_: object) -> None:
            raise RuntimeError("connection reset")

        set = add

    with pytest.raises(RankGoneError, match="connection reset"):
        RunStore(Gone(), 1, 2, owner).store("part", LONG)


def test_a_rank_that_was_killed_while_it_asked_holds_nobody_up() -> None:
    shared = HashStore()
    shared.add("asks", 1)  # it has taken a number, and set no key
    first, second = RunStore(shared, 0, 2, owner), RunStore(shared, 1, 2, owner)
    assert value_of(second, "a") == value_of(first, "b") == "a"
    all_have_heard()


def test_nobody_is_answered_after_the_process_group_has_ended() -> None:
    groups: list[object] = ["group"]
    shared = HashStore()
    RunStore(shared, 0, 2, lambda: groups[0])
    groups[0] = None
    all_have_heard()
    with pytest.raises(RankGoneError):
        RunStore(shared, 1, 2, owner).store("part", timedelta(seconds=0.05))
