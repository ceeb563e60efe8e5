"""The state of a process: its form, its bounds, and its live parts."""

from __future__ import annotations

import os

import pytest

from ft_transport.errors import PeerProtocolError
from ft_transport.telemetry.process_state import NUM_RECORDS, ProcessState, decode_state
from ft_transport.telemetry.process_status import LastErrors, ProcessStatus, Rates
from ft_transport.telemetry.record import Transfer, encode_json
from ft_transport.telemetry.recorder import Recorder


def told_by(watch: ProcessStatus) -> ProcessState:
    return decode_state(encode_json(watch.state()))


def test_what_is_told_is_of_the_form() -> None:
    watch = ProcessStatus(Recorder())
    watch.errors.note("10.0.0.1", os.fsdecode(b"no room for /x/\xff"))
    watch.recorder.begin("load", replica="a").end()
    with watch.recorder.begin("heal", replica="a", phase="quorum") as recording:
        recording.describe(step=7, num_bytes=100)
        recording.transfer(Transfer(peer="b:1", role="source", num_bytes=10, length_s=1.0))
        recording.follow(lambda: [Transfer(peer="b:1", role="source", num_bytes=5, length_s=0.5)])
        recording.phase("transfer")
        told = told_by(watch)
        recording.follow(None)
    after = told_by(watch)

    assert told.version == 1
    assert told.unix_s > 1e9
    assert [(error.about, error.text) for error in told.errors] == [("10.0.0.1", "no room for /x/?")]
    assert [record.kind for record in told.records] == ["load"]
    (running,) = told.running
    assert (running.kind, running.step, running.num_bytes) == ("heal", 7, 100)
    assert [phase.name for phase in running.phases] == ["quorum", "transfer"]
    assert sum(phase.length_s for phase in running.phases) == pytest.approx(running.length_s)
    assert [transfer.num_bytes for transfer in running.transfers] == [15]
    assert after.running == ()
    assert [record.kind for record in after.records] == ["load", "heal"]


def test_its_size_is_bounded() -> None:
    first, second = Recorder(), Recorder()
    watch = ProcessStatus(first)
    watch.set_recorders([first, second])
    for recorder in (first, second):
        for _ in range(NUM_RECORDS):
            with recorder.begin("heal", replica="r" * 10_000) as recording:
                for index in range(300):
                    recording.phase(f"phase {index}")
                    recording.retry("x" * 10_000)
                    recording.transfer(Transfer(peer=f"p{index}", role="source", num_bytes=1, length_s=1.0))
                recording.note(why="y" * 100_000)
                recording.end("failed", error="z" * 100_000)
    for index in range(1000):
        watch.errors.note("a" * 10_000, f"{index}" * 10_000)
    told = told_by(watch)
    assert len(told.records) == NUM_RECORDS
    for record in told.records:
        assert sum(phase.length_s for phase in record.phases) == pytest.approx(record.length_s)
    assert len(encode_json(watch.state())) < 512 << 10


def test_a_recording_that_is_dropped_is_told_of_no_more() -> None:
    recorder = Recorder()
    recording = recorder.begin("heal")
    recording.leave()
    assert len(recorder.running()) == 1
    del recording
    assert recorder.running() == ()


def test_the_same_error_again_is_counted() -> None:
    errors = LastErrors()
    for text in ("one", "one", "other", "one"):
        errors.note("a", text)
    assert [(error.text, error.count) for error in errors.recent()] == [("one", 2), ("other", 1), ("one", 1)]


def test_a_rate_is_that_of_the_last_second_or_so_however_many_ask() -> None:
    rates = Rates()
    assert rates.of("flow", 100, began_s=0.0, now_s=0.5) == 200.0
    assert rates.of("flow", 1000, began_s=0.0, now_s=1.0) == 1000.0
    # Another one who asks at once is told the same, and does not spoil what the first one is told next.
    assert rates.of("flow", 1000, began_s=0.0, now_s=1.0) == 1000.0
    assert rates.of("flow", 1100, began_s=0.0, now_s=1.1) == pytest.approx(1000.0)
    assert rates.of("flow", 1500, began_s=0.0, now_s=2.0) == pytest.approx(500.0)
    assert rates.of("flow", 1500, began_s=0.0, now_s=3.0) == 0.0
    # One that begins anew under the same name is another one.
    assert rates.of("flow", 10, began_s=3.0, now_s=3.5) == 20.0


@pytest.mark.parametrize("body", [b"", b"[]", b'{"manager": 7}', b"\xff", b'{"records": [{}]}'])
def test_what_is_not_of_the_form_is_refused(body: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="expected the state of a process"):
        decode_state(body)


def test_a_part_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> object:
        raise RuntimeError("not now")

    watch = ProcessStatus(Recorder())
    watch.set_part("broken", broken)
    watch.set_part("whole", lambda: {"step": 7})
    told = watch.state()
    assert (told["broken"], told["whole"]) == (None, {"step": 7})
    assert "cannot read the part broken of this process's state" in caplog.text
