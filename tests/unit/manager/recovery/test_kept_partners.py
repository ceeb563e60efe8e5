"""Copies that fail cost some kept steps, and never all of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from ranks_on_threads import groups_of

from ft_transport import HTTPTransport, PeerUnreachableError
from ft_transport.runtime.signal_safe import SafeEvent
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.transfer.kept_part import KeptPart
from manager.recovery.kept_partners import KeptPartners
from manager.recovery.kept_steps import KeepSettings, KeptSteps

TIMEOUT = timedelta(seconds=20)


class KeptByNobody:
    """Stands in for kept snapshots: copies of some steps fail."""

    largest_bytes = 1000

    def __init__(self) -> None:
        self.failing_from = 1_000_000
        self.copied: list[int] = []

    def share(self, _part: KeptPart) -> tuple[str, int]:
        return "http://127.0.0.1:9/checkpoint/", id(self)

    def parts(self) -> tuple[KeptPart, ...]:
        return ()

    def copy(self, part: KeptPart, *_: object) -> int:
        if part.step >= self.failing_from:
            raise PeerUnreachableError("no route to host")
        self.copied.append(part.step)
        return 1


@pytest.fixture
def transport() -> Iterator[HTTPTransport[Any]]:
    found = HTTPTransport[Any]()
    yield found
    found.shutdown()


def test_ranks_whose_copies_fail_from_different_steps_on_keep_steps_without_copies(
    transport: HTTPTransport[Any],
) -> None:
    groups = groups_of(2)
    kept: list[Any] = [KeptByNobody(), KeptByNobody()]
    kept[0].failing_from, kept[1].failing_from = 2, 3
    ranks = [
        KeptPartners(group, each, transport, KeepSettings(every=1, copies=2, domain=str(group.rank)), counts)
        for group, each, counts in zip(groups, kept, (MetricValues("keeping"), MetricValues("keeping")), strict=True)
    ]
    steps = [KeptSteps(group, TIMEOUT) for group in groups]
    decided: dict[int, list[bool | None]] = {}

    def keep(rank: int, step: int) -> bool | None:
        part = KeptPart(step=step, rank=rank, num_ranks=2)
        if ranks[rank].copy(part, steps[rank], 0.0, SafeEvent()):
            return steps[rank].report(step, SafeEvent())
        return steps[rank].give_up(step)

    with ThreadPoolExecutor(2) as pool:
        for step in range(1, 9):
            decided[step] = list(pool.map(keep, range(2), [step, step]))
    assert all(first == second for first, second in decided.values())
    assert [step for step, (is_kept, _) in decided.items() if is_kept] == [1, 5, 6, 7, 8]
    assert [each.copied for each in kept] == [[1], [1, 2]]
    assert [each.partners for each in ranks] == [(1,), (0,)]
