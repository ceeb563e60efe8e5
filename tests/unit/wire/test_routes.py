from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.wire import routes
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import CHUNK_HEADER, MAX_RANGES, chunks_of, format_ranges, parse_ranges, relayed_bytes


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


_TABLE = ChunkTable(data_bytes=1050, chunk_bytes=100)


@given(st.lists(st.integers(0, _TABLE.num_chunks - 1), min_size=1, unique=True))
def test_what_is_asked_for_is_what_is_understood_in_its_order(chunks: list[int]) -> None:
    ranges = parse_ranges(format_ranges(_TABLE, chunks))
    assert ranges is not None
    assert chunks_of(_TABLE, ranges) == chunks
    assert relayed_bytes(_TABLE, chunks) == sum(CHUNK_HEADER.size + _TABLE.length_of(chunk) for chunk in chunks)


def test_neighbours_are_one_range() -> None:
    assert format_ranges(_TABLE, [4, 5, 6, 0, 1, 10]) == "400-700,0-200,1000-1050"


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "5", "0-", "-5", "5-5", "7-5", "0-5,4-9", "4-9,0-5"),
        *("0-5,0-5", "0-5,", "+0-5", "0-\u0665", "0x0-0x5", "0-1e9", "0-" + 19 * "9"),
        ",".join(f"{2 * at}-{2 * at + 1}" for at in range(MAX_RANGES + 1)),
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_ranges(text) is None


def test_the_longest_request_fits_a_line_of_http() -> None:
    table = ChunkTable(data_bytes=10**15, chunk_bytes=1 << 20)
    text = format_ranges(table, range(0, 2 * MAX_RANGES, 2))
    assert parse_ranges(text) is not None
    largest = ",".join(f"{10**17 + 2 * at}-{10**17 + 2 * at + 1}" for at in range(MAX_RANGES))
    assert parse_ranges(largest) is not None
    assert len(largest) < 4096


@pytest.mark.parametrize(
    "ranges", [[(0, 99)], [(1, 100)], [(0, 1051)], [(1000, 1100)], [(1100, 1200)], [(0, 100), (150, 200)]]
)
def test_parts_of_chunks_are_none(ranges: list[tuple[int, int]]) -> None:
    assert chunks_of(_TABLE, ranges) is None
