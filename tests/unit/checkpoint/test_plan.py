"""The plan of a save: how errors list tensors."""

from __future__ import annotations

from ft_transport.checkpoint.plan import shown_names


def test_of_many_names_a_few_are_shown() -> None:
    assert shown_names(["a", "b"]) == "a, b"
    assert shown_names([str(number) for number in range(8)]) == "0, 1, 2, 3, 4 and 3 more"
