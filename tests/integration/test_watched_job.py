"""A job is watched while one of its replicas is killed, in Chromium and in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import queue
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import browser, complaints, needs_chromium, resize, states, texts
from served_memory import serving
from typer.testing import CliRunner
from watching import answer_of, job_of, listening

from ft_transport.cli.job import JobState, JobWatch
from ft_transport.cli.main import app
from ft_transport.credentials import TOKEN_VARIABLE, Keys
from ft_transport.http.client.peer_status import connecting
from ft_transport.telemetry.process_state import (
    ErrorStatus,
    HolderStatus,
    KeptStatus,
    LockStatus,
    ManagerStatus,
    MembershipChange,
    MemberStatus,
    ProcessState,
    StepStatus,
    TransferStatus,
    TransportStatus,
)
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.record import Phase, Record, Retry, Transfer
from ft_transport.telemetry.recorder import Recorder

LONG_S = 100.0
_IN_ITS_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from ft_transport.cli.main import main
main()
"""
ALL_TRAIN = {"A": "training", "B": "training", "C": "training"}
HOSTILE = "<img src=x onerror=window.hit=1>\u202e\u0000</script><script>window.hit=1</script>" + "x" * 10_000


def until(is_so: Callable[[], bool], what: str, timeout_s: float = LONG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"expected {what}"
        time.sleep(0.1)


class Replicas:
    """The demo's replicas, in processes of their own."""

    def __init__(self, lighthouse: str) -> None:
        from forking_demo import fork_replicas

        from manager.demo.replica import Event, ReplicaProcess

        fork_replicas()
        self.lighthouse = lighthouse
        self._process = ReplicaProcess
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.running: dict[str, ReplicaProcess] = {}

    def start(self, name: str) -> None:
        size = ["--width", "128", "--num-layers", "2"]
        self.running[name] = self._process.start(name, self._events, size, lighthouse=self.lighthouse)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        assert process.process.stdin is not None
        process.process.stdin.close()

    def kill_all(self) -> None:
        for name in tuple(self.running):
            self.kill(name)


@pytest.fixture
def replicas(torchft_ready: None) -> Iterator[Replicas]:
    from quorum_threads import lighthouse

    with lighthouse(heartbeat_timeout_ms=1000) as address:
        started = Replicas(address)
        for name in ALL_TRAIN:
            started.start(name)
        try:
            yield started
        finally:
            started.kill_all()


@contextmanager
def top_serving(address: str) -> Iterator[str]:
    """The URL of the page of ``ft-transport top --serve``, which runs meanwhile, and ends with Ctrl-C."""
    command = [sys.executable, "-m", "ft_transport.cli", "top", address, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(LONG_S) == 0


def look(lighthouse: str) -> tuple[int, JobState]:
    import msgspec

    result = CliRunner().invoke(app, ["top", lighthouse, "--once", "--json"])
    return result.exit_code, msgspec.json.decode(result.stdout, type=JobState)


def activities(job: JobState) -> dict[str, str]:
    return {
        each.name: each.state.manager.activity
        for each in job.processes
        if each.presence == "here" and each.state is not None and each.state.manager is not None
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_chromium
def test_a_killed_replica_leaves_the_page_heals_and_returns(
    replicas: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    until(lambda: activities(look(replicas.lighthouse)[1]) == ALL_TRAIN, "three replicas that train")
    exit_code, job = look(replicas.lighthouse)
    assert exit_code == 0
    address = next(each.address for each in job.processes if each.name == "A").removesuffix("checkpoint/")
    assert activities(look(address)[1]) == ALL_TRAIN
    with browser(tmp_path / "profile") as driver, top_serving(replicas.lighthouse) as page:
        driver.get(page)
        until(lambda: states(driver) == ALL_TRAIN, "three replicas that train, on the page")
        replicas.kill("B")
        until(lambda: states(driver).get("B") in ("silent", "gone"), "B to leave the page")
        until(lambda: "B left" in texts(driver, "#seen .line > span:nth-child(2)"), "B to be gone")
        assert "B is gone" in "".join(texts(driver, "#banner"))
        shown = CliRunner().invoke(app, ["top", replicas.lighthouse, "--once"])
        assert shown.exit_code in (0, 1)  # The Lighthouse's page has forgotten the dead one, or not yet.
        assert len(shown.stdout.splitlines()) <= 24
        replicas.start("B")
        until(lambda: states(driver) == ALL_TRAIN, "B to be back")
        healed = "#recoveries li[data-name=B][data-kind=heal][data-outcome=ok]"
        until(lambda: bool(texts(driver, healed)), "the record of B's heal")
        seen = "\n".join(reversed(texts(driver, "#seen .line > span:nth-child(2)")))
        assert "B healed at step" in seen
        assert ", from " in seen
        assert "B is back, and trains" in seen
        # Its phases, when it is opened by the keyboard.
        driver.execute_script("document.querySelector(arguments[0]).focus()", healed)
        driver.switch_to.active_element.send_keys("\n")
        (opened,) = texts(driver, f"{healed}[aria-expanded=true]")
        for phase in ("quorum", "manifest", "transfer", "first step"):
            assert phase in opened
        assert "127.0.0.1" in opened
        assert complaints(driver) == []
        driver.get(address)
        until(lambda: states(driver) == {"A": "training"}, "the page of A alone")
        # A page that was opened after it all knows what has happened.
        changes = texts(driver, "#changes li")
        assert any(change.startswith("B") and "all stood still for" in change for change in changes)
        assert any(change.startswith("B") and "joined" in change for change in changes)
        until(lambda: "3, 3 contribute" in "".join(texts(driver, "#figures dd")), "the size of the quorum")
        assert complaints(driver) == []
    _, job = look(replicas.lighthouse)
    heal = next(each.record for each in reversed(job.records) if each.name == "B" and each.record.kind == "heal")
    assert heal.outcome == "ok"
    assert heal.transfers
    replicas.kill_all()
    exit_code, _ = look(replicas.lighthouse)
    assert exit_code == 1


def hostile_state() -> ProcessState:
    phases = (Phase(name=HOSTILE, start_s=0.0, length_s=1.0), Phase(name="transfer", start_s=1.0, length_s=1.0))
    transfers = (Transfer(peer=HOSTILE, role="source", num_bytes=5, length_s=1.0, interface=HOSTILE),)
    retries = (Retry(at_s=0.5, cause=HOSTILE, peer=HOSTILE),)
    common: dict[str, Any] = {"begun_unix_s": 1.0, "length_s": 2.0, "replica": HOSTILE, "phases": phases}
    record = Record(
        kind="heal", outcome="failed", error=HOSTILE, transfers=transfers, retries=retries, notes={}, **common
    )
    flow = TransferStatus(peer=HOSTILE, replica=HOSTILE, step=3, num_bytes=5)
    return ProcessState(
        unix_s=1.0,
        transport=TransportStatus(replica=HOSTILE, address=HOSTILE, sends=(flow,), receives=(flow,)),
        manager=ManagerStatus(
            replica_id=HOSTILE,
            activity="healing",
            partial=HOSTILE,
            lighthouse=HOSTILE,
            lock=LockStatus(holders=(HolderStatus(kind="write", what=HOSTILE, age_s=9.0),)),
            steps=(StepStatus(step=2, length_s=1.0, is_committed=False, cause=HOSTILE),),
        ),
        kept=KeptStatus(step=3, num_bytes=5, partners=tuple(range(500)), copied_ranks=(1,), copied_step=3),
        records=(record,),
        running=(Record(outcome="running", kind="heal", transfers=transfers, retries=retries, **common),),
        errors=(ErrorStatus(unix_s=1.0, about=HOSTILE, text=HOSTILE),),
        changes=(MembershipChange(unix_s=1.0, kind="left", replica_id=HOSTILE, step=3, text=HOSTILE),),
    )


@pytest.fixture(params=["process", "job"])
def hostile_page(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    import msgspec

    body = answer_of(msgspec.json.encode(hostile_state()))
    with ExitStack() as open_:
        peer = open_.enter_context(listening(lambda connected, _ended: connected.sendall(body)))
        watch = ProcessStatus(Recorder())
        served = open_.enter_context(serving(process_status=watch))
        if request.param == "job":
            watch.set_part("job", JobWatch(job_of(**{HOSTILE[:300]: peer}), connecting(None, None)).recent)
        else:
            for name, part in msgspec.to_builtins(hostile_state()).items():
                watch.set_part(name, lambda part=part: part)  # type: ignore[misc]
        driver = open_.enter_context(browser(tmp_path / "profile"))
        yield driver, f"http://127.0.0.1:{served.server.port}/"


@needs_chromium
@pytest.mark.slow
def test_what_peers_say_is_text_and_nothing_else(hostile_page: tuple[Any, str]) -> None:
    driver, address = hostile_page
    driver.get(address)
    until(lambda: len(states(driver)) == 1, "a replica")
    driver.execute_script("document.querySelectorAll('.row').forEach((row) => row.click())")
    assert driver.execute_script("return window.hit") is None
    assert driver.execute_script("return document.querySelectorAll('img, script').length") == 1
    text = driver.find_element("tag name", "body").text
    assert "<img src=x onerror" in text
    assert "\u202e" not in text
    for width in (1280, 400):
        resize(driver, width)
        assert driver.execute_script("return innerWidth") == width
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert complaints(driver) == []


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("hostile_page", ["process"], indirect=True)
def test_it_is_used_by_keyboard_in_dark_and_light(hostile_page: tuple[Any, str]) -> None:
    driver, address = hostile_page
    driver.get(address)
    until(lambda: len(states(driver)) == 1, "a replica")

    def press(keys: str) -> None:
        driver.switch_to.active_element.send_keys(keys)

    def background() -> str:
        return str(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))

    before = background()
    press("t")
    assert background() != before
    driver.refresh()
    until(lambda: len(states(driver)) == 1, "a replica")
    assert background() != before
    press("j")
    assert driver.execute_script("return document.activeElement.dataset.state") == "healing"
    press("\n")
    assert driver.execute_script("return document.activeElement.getAttribute('aria-expanded')") == "true"
    assert "copies of rank 1 at step 3" in driver.find_element("tag name", "body").text
    press("j")
    assert driver.execute_script("return document.activeElement.dataset.kind") == "heal"
    press("k")
    press("?")
    assert driver.execute_script("return document.querySelector('dialog').open")
    press("\ue00c")
    press("/")
    press("no such replica")
    until(lambda: states(driver) == {}, "nothing that contains the text")
    press("\ue00c")
    until(lambda: len(states(driver)) == 1, "all of it again")


@needs_chromium
@pytest.mark.slow
def test_a_page_that_is_opened_afterwards_shows_the_death_and_the_lost_lighthouse(tmp_path: Path) -> None:
    members = tuple(MemberStatus(replica_id=f"{name}:1", step=41) for name in ("a", "b"))
    manager = ManagerStatus(
        replica_id="a:1",
        activity="waiting",
        step=41,
        quorum="5",
        members=members,
        num_participants=2,
        lighthouse="http://lh:1",
        is_lighthouse_lost=True,
    )
    change = MembershipChange(
        unix_s=time.time() - 60, kind="left", replica_id="c:1", step=41, text="left: all stood still"
    )
    watch = ProcessStatus(Recorder())
    watch.set_part("unix_s", time.time)
    watch.set_part("manager", lambda: manager)
    watch.set_part("changes", lambda: (change,))
    with browser(tmp_path / "profile") as driver, serving(process_status=watch) as served:
        driver.get(f"http://127.0.0.1:{served.server.port}/")
        until(lambda: bool(texts(driver, "#changes li")), "the change")
        assert "Lighthouse http://lh:1 does not answer: without it no quorum is formed" in texts(driver, "#banner")[0]
        assert texts(driver, "#changes .name") == ["c"]
        assert "left: all stood still" in texts(driver, "#changes li")[0]
        assert any("2, 2 contribute" in figure for figure in texts(driver, "#figures dd"))
        assert complaints(driver) == []


@needs_chromium
@pytest.mark.slow
def test_it_says_when_it_is_disconnected_and_connects_again(tmp_path: Path) -> None:
    with ExitStack() as open_:
        driver = open_.enter_context(browser(tmp_path / "profile", dark=True))
        with serving() as served:
            port = served.server.port
            driver.get(f"http://127.0.0.1:{port}/")
            until(lambda: texts(driver, "#link") == ["live"], "to be connected")
        until(lambda: "disconnected" in texts(driver, "#link")[0], "to say that it is disconnected")
        with serving(port=port):
            until(lambda: texts(driver, "#link") == ["live"], "to be connected again")


@pytest.mark.usefixtures("torchft_ready")
def test_top_says_what_is_missing() -> None:
    from quorum_threads import lighthouse

    wrong = CliRunner().invoke(app, ["top", "ftp://nowhere"])
    assert wrong.exit_code == 1
    assert "expected a URL like http(s)://host:port" in str(wrong.exception)
    nobody = CliRunner().invoke(app, ["top", "127.0.0.1:9", "--once"])
    assert nobody.exit_code == 1
    assert "THE LIGHTHOUSE DOES NOT ANSWER" in nobody.stdout
    with lighthouse() as address:
        empty = CliRunner().invoke(app, ["top", address, "--once", "--json"])
    assert empty.exit_code == 1
    told = json.loads(empty.stdout)
    assert (told["processes"], told["is_lighthouse_read"]) == ([], True)


@needs_chromium
@pytest.mark.slow
def test_a_browser_gets_in_with_the_watch_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-job-token-of-some-length"
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    (watch_token,) = Keys.of(token).watch_tokens()
    with (
        browser(tmp_path / "profile") as driver,
        serving(token=token) as served,
        top_serving(served.server.address) as job,
    ):
        for address in (f"http://127.0.0.1:{served.server.port}/", job):
            place = address.removeprefix("http://")
            driver.get(f"http://{place}")
            assert states(driver) == {}
            driver.get(f"http://watcher:{watch_token}@{place}")
            until(lambda: texts(driver, "#link") == ["live"], "to be connected")
            assert states(driver) == {"replica-7": "serving"}
            driver.get(f"http://{place}")
            until(lambda: texts(driver, "#link") == ["live"], "to be connected")


@pytest.mark.slow
@pytest.mark.usefixtures("torchft_ready")
@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_top_in_a_terminal_ends_with_a_key_and_leaves_it_as_it_was(end: bytes) -> None:
    from quorum_threads import lighthouse

    terminal, its_end = pty.openpty()
    try:
        fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = termios.tcgetattr(its_end)
        with lighthouse() as address:
            program = [sys.executable, "-c", _IN_ITS_TERMINAL, "top", address]
            process = subprocess.Popen(
                program,
                stdin=its_end,
                stdout=its_end,
                stderr=its_end,
                start_new_session=True,
                env={**os.environ, "TERM": "xterm", "LINES": "24", "COLUMNS": "80"},
            )
            shown = b""
            while b"no replica is known" not in shown:
                shown += os.read(terminal, 65536)
            os.write(terminal, end)
            reader = threading.Thread(target=_drain, args=(terminal, process), daemon=True)
            reader.start()
            assert process.wait(30) == 1
            reader.join()
        assert termios.tcgetattr(its_end) == before
    finally:
        os.close(terminal)
        os.close(its_end)


def _drain(terminal: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
