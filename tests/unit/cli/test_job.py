"""A job as `top` sees it: present and departed replicas, and processes that answer as they should not."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
from clocks import Clock
from served_memory import serving
from watching import answer_of, encoded_state, job_of, listening

from ft_transport.cli.job import MAX_PROCESSES, JobState, JobWatch, KnownJob, KnownMember
from ft_transport.cli.top import JobFinder
from ft_transport.credentials import Keys
from ft_transport.errors import ConfigurationError
from ft_transport.http.client.peer_status import connecting
from ft_transport.telemetry.process_state import ManagerStatus, MembershipChange, MemberStatus
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.record import encode_json
from ft_transport.telemetry.recorder import Recorder

NOBODY = "http://127.0.0.1:9/checkpoint/"


def watching(find: Callable[[], KnownJob], clock: Callable[[], float] = time.monotonic) -> JobWatch:
    return JobWatch(find, connecting(None, None), clock=clock)


def presences(job: JobState) -> dict[str, str]:
    return {process.replica_id: process.presence for process in job.processes}


def test_a_replica_leaves_starts_again_and_is_back() -> None:
    watch = ProcessStatus(Recorder())
    watch.set_part("manager", lambda: ManagerStatus(replica_id="b:1", step=7, activity="training"))
    clock = Clock()
    known: list[KnownMember] = []
    looking = watching(lambda: KnownJob(members=tuple(known), is_lighthouse_read=True), clock)
    with serving(process_status=watch) as served:
        known[:] = [KnownMember(name="b", replica_id="b:1", addresses=(f"{served.server.address}/checkpoint/",))]
        (process,) = looking.look().processes
        assert (process.presence, process.state.manager.step) == ("here", 7)  # type: ignore[union-attr]
    clock.now_s += 5
    (process,) = looking.look().processes
    assert (process.presence, process.since_s) == ("silent", 0.0)
    assert "PeerUnreachableError" in process.error
    clock.now_s += 2
    # The Lighthouse no longer hears it: it has left, and since it fell silent.
    known[:] = [KnownMember(name="b", replica_id="b:1", silent_s=2.0)]
    (process,) = looking.look().processes
    assert (process.presence, process.since_s) == ("gone", 2.0)
    known[:] = []
    assert presences(looking.look()) == {"b:1": "gone"}
    known[:] = [KnownMember(name="b", replica_id="b:2")]
    assert presences(looking.look()) == {"b:2": "coming"}
    with serving(process_status=watch) as served:
        known[:] = [KnownMember(name="b", replica_id="b:2", addresses=(f"{served.server.address}/checkpoint/",))]
        assert presences(looking.look()) == {"b:2": "here"}


def test_the_same_departure_told_by_all_survivors_is_one() -> None:
    death = MembershipChange(unix_s=50.0, kind="left", replica_id="c:1", step=41, text="left" * 1000)
    tolds = [(death,), (replace(death, unix_s=49.0), replace(death, step=60, unix_s=70.0))]
    with ExitStack() as open_:
        members = []
        for at, told in enumerate(tolds):
            watch = ProcessStatus(Recorder())
            watch.set_part("changes", lambda told=told: told)
            address = f"{open_.enter_context(serving(process_status=watch)).server.address}/checkpoint/"
            members.append(KnownMember(name=f"r{at}", replica_id=f"r{at}:1", addresses=(address,)))
        job = watching(lambda: KnownJob(members=tuple(members))).look()
    assert [each.step for each in job.changes] == [41, 60]
    # The processes' clocks are compared over a request.
    assert [each.unix_s for each in job.changes] == pytest.approx([49.0, 70.0], abs=1.0)
    assert max(len(each.text) for each in job.changes) < 400
    assert all(each.state is not None and each.state.changes == () for each in job.processes)


def test_a_replica_that_left_before_anybody_looked_has_a_row_until_it_returns() -> None:
    now_s = time.time()
    changes = [
        MembershipChange(unix_s=now_s - 3000, kind="left", replica_id="long:1", step=2),
        MembershipChange(unix_s=now_s - 80, kind="left", replica_id="back:1", step=30),
        MembershipChange(unix_s=now_s - 60, kind="joined", replica_id="back:2", step=40),
        MembershipChange(unix_s=now_s - 50, kind="left", replica_id="c:1", step=41),
    ]
    watch = ProcessStatus(Recorder())
    watch.set_part("changes", lambda: tuple(changes))
    with serving(process_status=watch) as served:
        survivor = KnownMember(name="r", replica_id="r:1", addresses=(f"{served.server.address}/checkpoint/",))
        looking = watching(lambda: KnownJob(members=(survivor,)))
        survivor_row, gone = looking.look().processes
        changes.append(MembershipChange(unix_s=now_s - 1, kind="joined", replica_id="c:2", step=60))
        after = looking.look()
    assert survivor_row.presence == "here"
    assert (gone.name, gone.presence, gone.step) == ("c", "gone", 41)
    assert 50 <= gone.since_s < 60
    assert presences(after) == {"r:1": "here"}


def test_who_is_gone_for_long_is_forgotten() -> None:
    clock = Clock()
    known = [KnownMember(name="b", replica_id="b:1", addresses=(NOBODY,))]
    looking = watching(lambda: KnownJob(members=tuple(known)), clock)
    assert presences(looking.look()) == {"b:1": "silent"}
    known.clear()
    clock.now_s += 599
    assert presences(looking.look()) == {"b:1": "gone"}
    clock.now_s += 2
    assert presences(looking.look()) == {}


def huge(connected: socket.socket, ended: threading.Event) -> None:
    connected.sendall(answer_of(b"{", length=100 << 20))
    while not ended.is_set():
        connected.sendall(b" " * 65536)


def endless(connected: socket.socket, ended: threading.Event) -> None:
    connected.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not ended.wait(0.01):
        connected.sendall(b"1\r\n \r\n")


def trickling(connected: socket.socket, ended: threading.Event) -> None:
    connected.sendall(answer_of(b"", length=1000))
    while not ended.wait(0.05):
        connected.sendall(b" ")


def silent(connected: socket.socket, ended: threading.Event) -> None:
    ended.wait(20)


Respond = Callable[[socket.socket, threading.Event], None]


def telling(body: bytes) -> Respond:
    return lambda connected, _ended: connected.sendall(answer_of(body))


@pytest.mark.parametrize(
    "respond",
    [
        huge,
        endless,
        trickling,
        silent,
        telling(b'{"version": 1, "manager": [' + b"[" * 10_000),
        telling(b'{"version": "new", "manager": {"step": {}}}'),
        telling(b'{"manager": {"num_refused": ' + b"9" * 4000 + b"}}"),
    ],
    ids=["huge", "endless", "trickling", "silent", "nonsense", "another shape", "no number"],
)
def test_a_member_that_answers_as_it_should_not_costs_a_second(respond: Respond) -> None:
    with serving() as served, listening(respond) as bad:
        looking = watching(job_of(good=f"{served.server.address}/checkpoint/", bad=bad))
        job = looking.look()

    assert presences(job) == {"bad:1": "silent", "good:1": "here"}
    assert job.took_s < 3.0
    assert job.processes[0].error


@pytest.mark.parametrize(
    "told",
    [
        b'{"transport": {"snapshots": [' + b",".join([b'{"step": 1, "num_bytes": 1}'] * 17_000) + b"]}}",
        b'{"manager": {"partial": "' + b"x" * 500_000 + b'"}}',
    ],
)
def test_a_member_that_tells_too_much_is_told_of_no_further(told: bytes) -> None:
    with listening(telling(told)) as bad:
        job = watching(job_of(bad=bad)).look()
    assert presences(job) == {"bad:1": "silent"}
    assert "expected the state of a process in at most" in job.processes[0].error


def test_what_one_member_makes_all_who_watch_read_is_bounded() -> None:
    phase = b'{"name": "a", "start_s": 0, "length_s": 0}'
    record = b'{"kind": "heal", "begun_unix_s": 0, "length_s": 0, "outcome": "ok", "error": "%s", "phases": [%s]}'
    flows = b",".join([b'{"peer":""}'] * 20_000)
    records = b",".join([record % (b"x" * 5000, b",".join([phase] * 100))] * 20)
    with listening(telling(b'{"transport": {"sends": [%s]}, "records": [%s]}' % (flows, records))) as bad:
        job = watching(job_of(bad=bad)).look()
    assert presences(job) == {"bad:1": "here"}
    assert len(encode_json(job)) < 160 << 10
    assert [len(each.record.phases) for each in job.records] == [61] * 20


def test_a_newer_version_may_say_more_and_an_older_one_less() -> None:
    newer = telling(b'{"version": 2, "moon": "full", "manager": {"step": 9, "more": []}}')
    with listening(newer) as there, listening(telling(b"{}")) as before:
        job = watching(job_of(new=there, old=before)).look()

    new, old = job.processes
    assert new.state is not None
    assert new.state.manager is not None
    assert new.state.manager.step == 9
    assert (old.presence, old.state.manager if old.state else "") == ("here", None)


def test_a_big_job_is_bounded_and_says_what_it_leaves_out() -> None:
    members = tuple(
        KnownMember(name=f"r{index:04}", replica_id=f"r{index:04}:1", addresses=(NOBODY,)) for index in range(600)
    )
    job = watching(lambda: KnownJob(members=members)).look()
    assert (len(job.processes), job.num_left_out) == (MAX_PROCESSES, 600 - MAX_PROCESSES)


def test_clocks_that_differ_make_no_record_old() -> None:
    error = b'{"unix_s": 999990.0, "about": "x", "text": "y"}'
    record = b'{"kind": "heal", "begun_unix_s": 999980.0, "length_s": 1.0, "outcome": "ok"}'
    with listening(telling(b'{"unix_s": 1000000.0, "errors": [%s], "records": [%s]}' % (error, record))) as there:
        job = watching(job_of(a=there)).look()

    assert job.unix_s - job.errors[0].error.unix_s == pytest.approx(10, abs=3)
    assert job.unix_s - job.records[0].record.begun_unix_s == pytest.approx(20, abs=3)


def test_who_has_the_job_token_is_told_and_an_impostor_gets_nothing() -> None:
    heard: list[bytes] = []

    def impostor(connected: socket.socket, ended: threading.Event) -> None:
        connected.sendall(answer_of(encoded_state(step=1)))
        heard.append(connected.recv(65536))

    token = "a-job-token-of-some-length"
    with serving(token=token) as served, listening(impostor) as there:
        find = job_of(genuine=f"{served.server.address}/checkpoint/", impostor=there)
        job = JobWatch(find, connecting(Keys.of(token), None)).look()

    assert presences(job) == {"genuine:1": "here", "impostor:1": "silent"}
    assert "PeerAuthenticationError" in job.processes[1].error or "MessageDamagedError" in job.processes[1].error
    assert not any(b"/state" in each for each in heard)


def test_no_request_names_who_is_asked() -> None:
    heard = threading.Event()

    def respond(connected: socket.socket, ended: threading.Event) -> None:
        heard.set()

    with listening(respond) as there, serving() as member:
        watch = ProcessStatus(Recorder())
        watch.set_part("job", watching(job_of(a=f"{member.server.address}/checkpoint/")).recent)
        with serving(process_status=watch) as served:
            query = f"address={there}&lighthouse={there}&members={there}"
            headers = {"X-Forwarded-Host": there.split("/")[2], "Forwarded": f"host={there}", "Referer": there}
            (process,) = json.loads(served.ask(f"/state?{query}", **headers).body)["job"]["processes"]

    assert process["address"] == f"{member.server.address}/checkpoint/"
    assert process["presence"] == "here"
    assert not heard.is_set()


def test_a_crowd_of_browsers_costs_two_looks_a_second_and_nobody_costs_nothing() -> None:
    num_looks = 0

    def find() -> KnownJob:
        nonlocal num_looks
        num_looks += 1
        return KnownJob()

    clock = Clock()
    looking = watching(find, clock)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: looking.recent(), range(50)))
    assert num_looks == 1
    clock.now_s += 0.4
    looking.recent()
    assert num_looks == 1
    clock.now_s += 0.2
    looking.recent()
    assert num_looks == 2


def test_a_process_without_a_quorum_is_a_job_of_one() -> None:
    with serving() as served:
        find = JobFinder(served.server.address, connecting(None, None))
        looking = watching(find)
        job = looking.look()
        assert (job.lighthouse, presences(job)) == ("", {"replica-7": "here"})
    assert presences(looking.look()) == {"replica-7": "silent"}


def test_a_process_names_its_lighthouse_and_the_members_also_after_it_has_exited() -> None:
    member = MemberStatus(replica_id="b:1", step=7, addresses=(NOBODY,))
    watch = ProcessStatus(Recorder())
    watch.set_part(
        "manager", lambda: ManagerStatus(replica_id="a:1", lighthouse="http://127.0.0.1:9", members=(member,))
    )
    with serving(process_status=watch) as served:
        find = JobFinder(f"{served.server.address}/checkpoint/", connecting(None, None))
        job = find()
    expected = KnownMember(name="b", replica_id="b:1", addresses=(NOBODY,), step=7)
    assert job == KnownJob(members=(expected,), lighthouse="http://127.0.0.1:9")
    assert find() == job


def test_where_nothing_answers_the_address_is_that_of_a_lighthouse() -> None:
    assert JobFinder("127.0.0.1:9", connecting(None, None))() == KnownJob(lighthouse="http://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="expected a URL"):
        JobFinder("ftp://host:1", connecting(None, None))
