import contextvars
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from clocks import Clock
from interruptions import at_every_place

from ft_transport.errors import PeerUnreachableError
from ft_transport.telemetry.record import Record, Transfer, decode_record
from ft_transport.telemetry.recorder import Recorder, current


def test_phases_follow_each_other_without_a_gap_and_make_up_the_whole() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    with recorder.begin("heal", replica="a", group_rank=1, phase="quorum") as recording:
        clock.now_s += 1.5
        recording.phase("manifest")
        clock.now_s += 0.25
        recording.phase("transfer")
        clock.now_s += 4.0
        recording.describe(step=7, num_bytes=1024)
    (record,) = recorder.recent()
    assert [(phase.name, phase.start_s, phase.length_s) for phase in record.phases] == [
        ("quorum", 0.0, 1.5),
        ("manifest", 1.5, 0.25),
        ("transfer", 1.75, 4.0),
    ]
    assert record.length_s == sum(phase.length_s for phase in record.phases) == 5.75
    assert (record.outcome, record.replica, record.group_rank, record.step, record.num_bytes) == ("ok", "a", 1, 7, 1024)


def test_a_fetch_within_a_heal_is_part_of_its_record() -> None:
    recorder = Recorder()
    with recorder.begin("heal", phase="quorum"):
        with recorder.begin("fetch", phase="manifest") as fetch:
            fetch.phase("transfer")
            fetch.transfer(Transfer(peer="http://a:1", role="source", num_bytes=10, length_s=1.0))
            fetch.transfer(Transfer(peer="http://a:1", role="source", num_bytes=30, length_s=1.0))
            fetch.retry(PeerUnreachableError("nobody there"), peer="http://b:1")
        assert current() is not None
    (record,) = recorder.recent()
    assert record.kind == "heal"
    assert [phase.name for phase in record.phases] == ["quorum", "manifest", "transfer"]
    assert [(t.num_bytes, t.bytes_per_s) for t in record.transfers] == [(40, 20.0)]
    assert [(retry.cause, retry.peer) for retry in record.retries] == [
        ("PeerUnreachableError: nobody there", "http://b:1")
    ]
    assert current() is None


def test_what_fails_is_recorded_with_its_error_and_the_error_goes_on() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.begin("save"):
        raise KeyError("x")
    (record,) = recorder.recent()
    assert (record.outcome, record.error) == ("failed", "KeyError: 'x'")


def test_threads_record_apart() -> None:
    recorder = Recorder()

    def load() -> None:
        with recorder.begin("load"):
            pass

    with recorder.begin("save"):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert {record.kind for record in recorder.recent()} == {"save", "load"}


def test_a_recording_may_end_where_the_context_is_another() -> None:
    recorder = Recorder()
    recording = contextvars.copy_context().run(recorder.begin, "publish")
    assert recording.end() is not None
    assert recording.end() is None
    assert [record.kind for record in recorder.recent()] == ["publish"]


def test_a_handler_that_raises_anywhere_in_a_recording_leaves_none_open() -> None:
    recorder = Recorder()

    def record() -> None:
        with recorder.begin("fetch") as recording:
            recording.phase("transfer")

    def check() -> None:
        assert current() is None
        recorder.begin("load").end()
        assert recorder.recent()[-1].kind == "load"

    at_every_place(record, check, at_least=15)


def test_records_are_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_RECORDS", str(tmp_path / "records.jsonl"))
    recorder = Recorder(num_stored=1)
    for _ in range(3):
        recorder.begin("load").end()
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines()
    assert [decode_record(line).kind for line in lines] == ["load"] * 3
    assert decode_record(lines[-1]) == recorder.recent()[-1]
    assert len(recorder.recent()) == 1


def test_a_file_that_cannot_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(path=tmp_path / "missing" / "records.jsonl")
    for _ in range(3):
        recorder.begin("load").end()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(recorder.recent()) == 3


def test_a_fifo_is_no_file_of_records_and_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "records")
    Recorder(path=tmp_path / "records").begin("load").end()
    assert "no more records are written" in caplog.text


def test_what_is_interrupted_in_a_recording_may_end_it() -> None:
    class Interrupting:
        def __init__(self) -> None:
            self.now_s = 0.0
            self.act: Callable[[], object] = lambda: None

        def __call__(self) -> float:
            act, self.act = self.act, lambda: None
            act()
            return self.now_s

    clock = Interrupting()
    recording = Recorder(clock=clock).begin("heal")
    clock.act = recording.end
    recording.retry("interrupted here")
    assert recording.end() is None


def test_listeners_hear_each_record_and_one_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    heard: list[Record] = []

    def fail(_: Record) -> None:
        raise ValueError

    recorder.subscribe(fail)
    end = recorder.subscribe(heard.append)
    recorder.begin("load").end()
    end()
    recorder.begin("load").end()
    assert len(heard) == 1
    assert "a subscriber of records raised an error" in caplog.text
