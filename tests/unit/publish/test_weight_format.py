"""How tensors are written for engines: which settings work, and what ranks compare of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_transport import ConfigurationError, WeightFormat


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"names": ["a"]}, "expected a function or a table as names, got list"),
        ({"names": {"a": 3}}, "expected a table from names to names, or None, got 'a': 3"),
        ({"names": {3: "a"}}, "expected a table from names to names, or None, got 3: 'a'"),
        ({"dtype": torch.int8}, r"expected one of torch\.float64.* as dtype, got torch\.int8"),
        ({"dtype": torch.float8_e4m3fn}, r"as dtype, got torch\.float8_e4m3fn"),
        ({"dtype": "bfloat16"}, "as dtype, got 'bfloat16'"),
        ({"max_shard_bytes": 0}, "expected max_shard_bytes of at least 1, got 0"),
        ({"max_shard_bytes": "5GB"}, "expected a whole number as max_shard_bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(options: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        WeightFormat(**options)


def test_ranks_compare_tables_whatever_their_order_and_functions_not_at_all() -> None:
    table: dict[str, str | None] = {"a": "b", "c": None}
    stated = WeightFormat(names=table).stated()
    assert stated == WeightFormat(names={"c": None, "a": "b"}).stated()
    assert stated != WeightFormat(names={"a": "b", "c": "None"}).stated()
    assert WeightFormat(names=str.upper).stated() == WeightFormat(names=str.lower).stated() != stated


def test_a_table_that_changes_later_changes_nothing() -> None:
    table: dict[str, str | None] = {"a": "b"}
    chosen = WeightFormat(names=table)
    table["c"] = "d"
    assert chosen.names == {"a": "b"}
