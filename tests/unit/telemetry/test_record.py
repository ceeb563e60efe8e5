"""Records survive their journey through a file, and what is no record is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_transport.errors import RecordError
from ft_transport.telemetry.record import Phase, Record, Retry, Transfer, decode_record, encode_json
from ft_transport.telemetry.recorder import Recorder

RECORD = Record(
    kind="heal",
    begun_unix_s=1.7e9,
    length_s=2.5,
    outcome="ok",
    replica="b",
    step=7,
    num_bytes=4096,
    phases=(Phase(name="quorum", start_s=0.0, length_s=0.5), Phase(name="transfer", start_s=0.5, length_s=2.0)),
    transfers=(Transfer(peer="http://a:1", role="source", num_bytes=4096, length_s=2.0, interface="eth0"),),
    retries=(Retry(at_s=0.6, cause="PeerUnreachableError: gone", peer="http://c:1"),),
    notes={"advertised": "http://b:1"},
)


def test_a_record_survives_its_line() -> None:
    line = encode_json(RECORD)
    assert b"\n" not in line
    assert decode_record(line) == RECORD
    assert decode_record(line.decode()) == RECORD


def test_what_quotes_a_path_of_any_bytes_is_written_too(tmp_path: Path) -> None:
    recorder = Recorder(path=tmp_path / "records")
    record = recorder.begin("save").end("failed", error=os.fsdecode(b"no room for /x/\xff"))
    assert record is not None
    assert decode_record((tmp_path / "records").read_bytes()).error == "no room for /x/?"


def test_what_a_newer_version_adds_is_passed_over() -> None:
    assert decode_record(encode_json(RECORD)[:-1] + b',"later":1}') == RECORD


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"kind": "party"}', b"\xff"])
def test_what_is_no_record_is_refused(line: bytes | str) -> None:
    with pytest.raises(RecordError, match="expected a record in JSON"):
        decode_record(line)


def test_phases_of_one_name_are_summed_up() -> None:
    phases = tuple(Phase(name=name, start_s=0.0, length_s=1.0) for name in ("manifest", "transfer", "manifest"))
    record = Record(kind="heal", begun_unix_s=0, length_s=3, outcome="ok", phases=phases)
    assert record.phase_lengths() == {"manifest": 2.0, "transfer": 1.0}
