"""Which versions may be deleted."""

import pytest

from ft_transport.publish.retention import Retention, StoredVersion


def stored(is_adapter: bool) -> list[StoredVersion]:
    """Versions 1 to 5, written at 10, 20, … seconds."""
    return [StoredVersion(number, is_adapter, 10.0 * number) for number in range(1, 6)]


@pytest.mark.parametrize(
    ("is_adapter", "retention", "used", "expected"),
    [
        (True, Retention(1, 0.0), set(), [1, 2, 3, 4]),
        (True, Retention(3, 0.0), set(), [1, 2]),
        (True, Retention(5, 0.0), set(), []),
        (True, Retention(9, 0.0), set(), []),
        (True, Retention(1, 0.0), {2, 4}, [1, 3]),
        (True, Retention(1, 15.0), set(), [1, 2]),  # 3 was replaced 10 s before the newest came
        (True, Retention(1, 1000.0), set(), []),
        (False, Retention(1, 1000.0), set(), [1, 2, 3, 4]),  # weights are not read again
        (False, Retention(2, 0.0), {1}, [2, 3]),
    ],
)
def test_what_expires(is_adapter: bool, retention: Retention, used: set[int], expected: list[int]) -> None:
    assert retention.expired(stored(is_adapter), used) == expected


def test_nothing_expires_where_there_is_nothing() -> None:
    assert Retention(1, 0.0).expired([], set()) == []
