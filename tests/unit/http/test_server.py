"""The routes as any HTTP client sees them. What goes wrong between client and server: test_server_trouble.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from served_memory import MemorySnapshot, Serving, serving

from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import decode_header
from ft_transport.wire.signing import SCHEME

DATA = bytes(range(256)) * 40


@pytest.fixture
def served() -> Iterator[Serving]:
    with serving() as serving_:
        yield serving_


@pytest.fixture
def snapshot(served: Serving) -> MemorySnapshot:
    return served.put(5, DATA)


def test_full_is_the_file(served: Serving, snapshot: MemorySnapshot) -> None:
    answer = served.ask("/checkpoint/5/full")

    assert (answer.status, answer.body) == (200, snapshot.content)
    assert answer.headers["Content-Length"] == str(snapshot.total_bytes)
    assert answer.headers["ETag"] == f'"{snapshot.snapshot_id}"'
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert "Transfer-Encoding" not in answer.headers


@pytest.mark.parametrize("path", ["/checkpoint/5/full", "/checkpoint/5/metadata"])
def test_head_says_what_get_would_send(served: Serving, snapshot: MemorySnapshot, path: str) -> None:
    got, head = served.ask(path), served.ask(path, "HEAD")

    assert (head.status, head.body) == (200, b"")
    assert served.ask(path, "HEAD", Range="bytes=0-9").headers["Content-Length"] == got.headers["Content-Length"]
    for name in ("Content-Length", "Content-Type", "ETag", "FT-Manifest-Digest"):
        assert head.headers[name] == got.headers[name]


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("0-9", 0, 10),
        ("7-7", 7, 8),
        ("100-", 100, None),
        ("-7", -7, None),
        ("10-9999999", 10, None),
        ("-9999999", 0, None),
    ],
)
def test_one_range_is_served(
    served: Serving, snapshot: MemorySnapshot, asked: str, start: int, end: int | None
) -> None:
    answer = served.ask("/checkpoint/5/full", Range=f"bytes={asked}")

    first, stop, _ = slice(start, end).indices(snapshot.total_bytes)
    assert (answer.status, answer.body) == (206, snapshot.content[start:end])
    assert answer.headers["Content-Range"] == f"bytes {first}-{stop - 1}/{snapshot.total_bytes}"
    assert answer.headers["Content-Length"] == str(stop - first)


def test_what_is_no_single_range_is_ignored(served: Serving, snapshot: MemorySnapshot) -> None:
    for asked in ("0-1,4-5", "a-b", "9-3", "-", f"{'9' * 5000}-"):
        answer = served.ask("/checkpoint/5/full", Range=f"bytes={asked}")
        assert (answer.status, answer.body) == (200, snapshot.content)
    for asked in ("items=0-5", "bytes"):
        assert served.ask("/checkpoint/5/full", Range=asked).status == 200


def test_a_range_outside_the_file_is_refused_with_its_length(served: Serving, snapshot: MemorySnapshot) -> None:
    for asked in (f"{snapshot.total_bytes}-", f"{snapshot.total_bytes}-99999999", "-0"):
        answer = served.ask("/checkpoint/5/full", Range=f"bytes={asked}")
        assert answer.status == 416
        assert answer.headers["Content-Range"] == f"bytes */{snapshot.total_bytes}"


def test_if_range_sends_the_whole_file_once_it_is_another(served: Serving, snapshot: MemorySnapshot) -> None:
    etag = f'"{snapshot.snapshot_id}"'
    same = served.ask("/checkpoint/5/full", Range="bytes=3-", If_Range=etag)
    newer = served.put(5, DATA[::-1])
    other = served.ask("/checkpoint/5/full", Range="bytes=3-", If_Range=etag)

    assert (same.status, same.body) == (206, snapshot.content[3:])
    assert (other.status, other.body) == (200, newer.content)


def test_metadata_is_the_header_of_the_file(served: Serving, snapshot: MemorySnapshot) -> None:
    answer = served.ask("/checkpoint/5/metadata")

    assert answer.status == 200
    assert answer.body == snapshot.header[8:]
    assert int.from_bytes(snapshot.header[:8], "little") == len(answer.body)
    assert answer.headers["FT-Manifest-Digest"] == f"{digest(answer.body):016x}"
    assert answer.headers["Content-Type"] == "application/json"
    json.loads(answer.body)
    manifest = decode_header(answer.body)
    assert (manifest.step, manifest.snapshot_id) == (5, snapshot.snapshot_id)
    assert manifest.total_bytes == snapshot.total_bytes


def test_status_before_and_after_the_first_snapshot(served: Serving) -> None:
    empty = json.loads(served.ask("/status").body)
    snapshot = served.put(3)
    newest = served.put(4, DATA)
    full = json.loads(served.ask("/status").body)

    assert len(empty["server"]) == 16
    assert empty.pop("server") == full.pop("server")
    assert empty == {
        "state": "empty", "replica": "replica-7", "step": None, "steps": [],
        "snapshot": None, "snapshot_bytes": 0, "clients": 0, "interfaces": [],
    }  # fmt: skip
    assert full == {
        "state": "serving", "replica": "replica-7", "step": 4, "steps": [snapshot.step, 4],
        "snapshot": newest.snapshot_id, "snapshot_bytes": newest.total_bytes, "clients": 0,
        "interfaces": [],
    }  # fmt: skip


def test_an_unknown_step_is_refused_with_those_that_are_served(served: Serving) -> None:
    served.put(5)
    served.put(6)
    for step in ("4", "0", "007x", "-1", "latest%20", "%ff", "1" * 30):
        answer = served.ask(f"/checkpoint/{step}/full")
        assert answer.status == 404
        assert answer.headers["FT-Served-Steps"] == "5,6"
        assert json.loads(answer.body)["error"] == "StepNotServedError"
    assert "expected step 4, but this replica serves [5, 6]" in served.ask("/checkpoint/4/full").body.decode()


def test_a_request_bound_to_a_snapshot_gets_that_one_or_none() -> None:
    with serving(max_snapshots=1) as served:
        first = served.put(5, b"first")
        path = f"/checkpoint/5/full?snapshot={first.snapshot_id}"
        before = served.ask(path)
        # The same step again: another snapshot all the same.
        second = served.put(5, b"second")
        after = served.ask(path)
        unbound = served.ask("/checkpoint/5/full")

    assert (before.status, before.body) == (200, first.content)
    assert after.status == 409
    assert json.loads(after.body)["error"] == "SnapshotReplacedError"
    assert unbound.body == second.content


def test_before_the_first_snapshot_a_request_waits_and_is_told_to_come_back() -> None:
    with serving(max_wait_s=0.2) as served:
        for wait in ("?wait=0.1", "?wait=1000", ""):
            started_s = time.monotonic()
            answer = served.ask(f"/checkpoint/latest/metadata{wait}")
            assert 0.1 <= time.monotonic() - started_s < 10
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1


def test_a_receiver_is_told_why_the_last_attempt_failed(served: Serving) -> None:
    path = "/checkpoint/latest/metadata?wait=0"
    served.cache.note_failure("step 3: UnsupportedLeafError: expected a leaf")
    assert "the last attempt failed: step 3: UnsupportedLeafError" in served.ask(path).body.decode()
    served.put(4)
    assert served.ask(path).status == 200
    served.server.requests.fresh_snapshot = lambda _step: 1
    assert "being fetched (step latest)" in served.ask(path).body.decode()
    served.cache.note_failure("step 5: OSError: no memory")
    assert "; the last attempt failed: step 5: OSError" in served.ask(path).body.decode()


def test_a_wait_that_is_no_time_is_refused(served: Serving) -> None:
    for text in ("x", "-1", "nan", "inf", "1e999", ""):
        answer = served.ask(f"/checkpoint/5/metadata?wait={text}")
        assert answer.status == 400
        assert json.loads(answer.body)["error"] == "ConfigurationError"


def test_a_later_step_is_waited_for_and_an_earlier_one_is_not(served: Serving) -> None:
    served.put(5)
    with closing(served.connect()) as later:
        later.request("GET", "/checkpoint/6/full")
        started_s = time.monotonic()
        earlier = served.ask("/checkpoint/4/full")
        assert time.monotonic() - started_s < 10
        snapshot = served.put(6, DATA)
        response = later.getresponse()
        assert (response.status, response.read()) == (200, snapshot.content)
    assert earlier.status == 404


def test_latest_waits_for_a_snapshot_that_is_new_enough() -> None:
    asked = threading.Event()

    def fresh(_step: int | None) -> int:
        asked.set()
        return 1  # What the first snapshot shows is out of date.

    with serving(fresh_snapshot=fresh) as served:
        old = served.put(1, b"old")
        with closing(served.connect()) as http:
            http.request("GET", "/checkpoint/latest/full")
            assert asked.wait(20)
            new = served.put(2, b"new")
            assert http.getresponse().read() == new.content
        # Nobody took a newer one in time: an old state must not pass for the latest.
        served.server.requests.fresh_snapshot = lambda _step: 2
        late = served.ask("/checkpoint/latest/full?wait=0")
        assert late.status == 503
        assert b"the newest one is older (step 2)" in late.body
        # Asked again, with the state changed once more meanwhile: what was new enough at first still is.
        after = late.headers["FT-After"]
        third = served.put(3, b"third")
        served.server.requests.fresh_snapshot = lambda _step: 3
        assert served.ask("/checkpoint/latest/full?wait=0").status == 503
        assert served.ask(f"/checkpoint/latest/full?wait=0&after={after}").body == third.content
        # What another server said, or nobody, changes nothing.
        for other in ("1000", "x"):
            assert served.ask(f"/checkpoint/latest/full?wait=0&after={other}").status == 503
        assert served.ask("/checkpoint/1/full").body == old.content


def test_a_step_that_was_asked_for_in_time_is_kept_until_the_request_has_looked() -> None:
    """On a busy machine further ones are published before the server's loop comes to the request that waits."""

    def fresh(step: int | None) -> int:
        if step == 6 and not taken:
            # On the server's loop, so that nobody looks meanwhile.
            taken.extend(served.put(number, DATA) for number in (6, 7, 8))
        return 0

    taken: list[MemorySnapshot] = []
    with serving(max_snapshots=2, fresh_snapshot=fresh) as served:
        answer = served.ask("/checkpoint/6/full")
        assert (answer.status, answer.body) == (200, taken[0].content)


def test_a_step_that_comes_between_two_requests_for_it_is_kept_for_the_second() -> None:
    with serving(max_snapshots=2, lease_s=20.0) as served, closing(served.connect()) as http:
        served.put(5)
        for expected_status in (404, 200):
            http.request("GET", "/checkpoint/6/metadata?wait=0")
            response = http.getresponse()
            response.read()
            assert response.status == expected_status
            for number in (6, 7, 8):
                served.put(number)


ROUTES = [
    "/status",
    "/checkpoint/5/full",
    "/checkpoint/5/metadata",
    "/checkpoint/5/memory",
    "/checkpoint/5/digests",
    "/checkpoint/4/delta",
    f"/relay/{32 * 'c'}",
    "/checkpoint/latest/full",
    "/nothing",
    "/nothing/here",
]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "secret",
        "Bearer secret",
        "Basic secret",
        f"{SCHEME} number=1, mac={64 * '0'}",
    ],
)
def test_without_the_token_no_route_says_anything(given: str | None) -> None:
    with serving(token="secret") as served:
        served.put(5)
        for path in ROUTES:
            answer = served.ask(path) if given is None else served.ask(path, Authorization=given)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == SCHEME
            assert "FT-Served-Steps" not in answer.headers
            assert b"secret" not in answer.body


def test_what_is_there_is_only_read(served: Serving, snapshot: MemorySnapshot) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert served.ask("/checkpoint/5/full", method).status == 405
