from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.wire import routes
from ft_transport.wire.manifest import SnapshotId


@pytest.mark.parametrize(("text", "step"), [("0", 0), ("12", 12), ("9" * 18, 10**18 - 1), ("latest", "latest")])
def test_a_step_is_a_number_or_latest(text: str, step: int | str) -> None:
    assert routes.parse_step(text) == step


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 1", "1_0", "0x1", "٣", "²", "9" * 19, "newest", "LATEST"])
def test_anything_else_is_no_step(text: str) -> None:
    assert routes.parse_step(text) is None


@given(st.text(max_size=30))
def test_any_text_is_a_step_or_none(text: str) -> None:
    step = routes.parse_step(text)
    assert step is None or step == "latest" or (isinstance(step, int) and 0 <= step < 10**18)


@pytest.mark.parametrize("step", [0, 7, 10**17, "latest"])
def test_a_metadata_path_says_how_long_the_server_may_wait(step: int) -> None:
    url = urlsplit(routes.metadata_path(step, wait_s=1.5))
    assert url.path == routes.METADATA_ROUTE.format(step=step)
    assert parse_qs(url.query) == {routes.WAIT_PARAMETER: ["1.500"]}


def test_a_data_path_is_bound_to_its_snapshot() -> None:
    snapshot_id = SnapshotId("0123456789abcdef" * 2)
    url = urlsplit(routes.bound_path(routes.FULL_ROUTE, 7, snapshot_id))
    assert url.path == routes.FULL_ROUTE.format(step=7)
    assert parse_qs(url.query) == {routes.SNAPSHOT_PARAMETER: [snapshot_id]}


@pytest.mark.parametrize(
    ("header", "steps"),
    [(None, ()), ("", ()), ("7", (7,)), ("7, 8,9", (7, 8, 9)), ("7, latest, x, -1,, 8", (7, 8)), (",", ())],
)
def test_served_steps_leave_out_what_is_no_number(header: str | None, steps: tuple[int, ...]) -> None:
    assert routes.parse_served_steps(header) == steps


def test_served_steps_of_a_peer_without_bounds_are_cut() -> None:
    assert 0 < len(routes.parse_served_steps("1," * 1_000_000)) <= 4096
