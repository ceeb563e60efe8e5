"""Whether an engine that has answered has to be told of the newest version again."""

from __future__ import annotations

import pytest

from ft_transport import VLLMEngine
from ft_transport.publish.delivery import EngineRecord, needs_delivery
from ft_transport.publish.engines.engine import Link
from ft_transport.publish.report import Outcome

NEWEST = 5


@pytest.mark.parametrize(
    ("outcome", "confirmed", "served", "expected"),
    [
        ("confirmed", 5, 5, False),
        ("confirmed", 5, 4, True),
        ("confirmed", 5, None, True),
        ("confirmed", 5, 6, False),  # of another trainer, which is further
        ("late", 4, 4, True),
        ("late", 4, 5, True),  # that it was resumed as well, nobody knows
        ("unreachable", None, None, True),
        ("unreachable", 4, 6, False),
        ("refused", 4, 4, False),
        ("refused", None, None, False),
        ("refused", 4, 3, True),
        ("refused", 4, None, True),
        ("failed", 4, 4, False),
        ("failed", 4, None, True),
    ],
)
def test_one_that_answers(outcome: Outcome, confirmed: int | None, served: int | None, expected: bool) -> None:
    record = EngineRecord(VLLMEngine("http://host"), Link(), version=confirmed, outcome=outcome)
    assert needs_delivery(record, NEWEST, served, is_reported=True, was_resumed=False) is expected


@pytest.mark.parametrize(
    ("outcome", "was_down", "was_resumed", "expected"),
    [
        ("confirmed", False, False, False),
        ("confirmed", True, False, True),
        ("late", False, False, True),
        ("refused", False, False, False),
        ("refused", True, False, True),
        ("refused", False, True, True),
    ],
)
def test_one_that_cannot_say(outcome: Outcome, was_down: bool, was_resumed: bool, expected: bool) -> None:
    record = EngineRecord(VLLMEngine("http://host"), Link(), version=4, outcome=outcome, was_down=was_down)
    assert needs_delivery(record, NEWEST, None, is_reported=False, was_resumed=was_resumed) is expected
