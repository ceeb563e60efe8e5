"""The check of prose finds sentences without their subject, in docstrings, their entries and comments."""

from __future__ import annotations

import pytest
from plain_words import faults_in


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What a replica says."""', [1]),
        ('"""Reports.\n\n    Args:\n        name: Of the replica.\n"""', [4]),
        ("value = 1\n# Whoever asks gets it.\n", [2]),
        ('def f():\n    """Send it.\n\n    The peer is told\n    at once.\n    """', [4]),
        ('"""Offers a place.\n\n    Attributes:\n        rank: Rank of this replica.\n"""\n# One of two.\n', []),
        ('text = "what is told"', []),
    ],
)
def test_each_fault_has_its_line(source: str, lines: list[int]) -> None:
    assert sorted(faults_in(source)) == lines
