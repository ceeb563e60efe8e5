import json
from typing import Any

from ft_transport.telemetry.chrome_trace import encode_trace
from ft_transport.telemetry.record import Phase, Record, Retry, Transfer


def events(*records: Record) -> list[dict[str, Any]]:
    return json.loads(encode_trace(records))["traceEvents"]  # type: ignore[no-any-return]


HEAL = Record(
    kind="heal",
    begun_unix_s=1000.5,
    length_s=3.0,
    outcome="ok",
    replica="b",
    group_rank=1,
    phases=(Phase(name="quorum", start_s=0.0, length_s=1.0), Phase(name="transfer", start_s=1.0, length_s=2.0)),
    transfers=(Transfer(peer="a:1", role="source", num_bytes=10, length_s=2.0),),
    retries=(Retry(at_s=1.5, cause="PeerUnreachableError: x", peer="a:1"),),
)
SAVE = Record(kind="save", begun_unix_s=1000.0, length_s=1.0, outcome="ok", replica="a")


def test_each_replica_is_a_process_and_each_rank_a_line() -> None:
    named = {
        (each["name"], each["pid"], each.get("tid")): each["args"]["name"]
        for each in events(HEAL, SAVE)
        if each["ph"] == "M"
    }
    assert named["process_name", 1, None] == "a"
    assert named["process_name", 2, None] == "b"
    assert named["thread_name", 2, 1] == "rank 1"


def test_phases_lie_within_their_record_and_records_at_their_time() -> None:
    whole = {each["name"]: each for each in events(HEAL, SAVE) if each["ph"] == "X"}
    assert (whole["save"]["ts"], whole["save"]["dur"]) == (0.0, 1e6)
    assert (whole["heal"]["ts"], whole["heal"]["dur"]) == (0.5e6, 3e6)
    assert (whole["transfer"]["ts"], whole["transfer"]["dur"]) == (1.5e6, 2e6)
    assert whole["source a:1"]["tid"] != whole["heal"]["tid"]
    assert whole["source a:1"]["args"]["bytes_per_s"] == 5.0


def test_retries_are_instants() -> None:
    (instant,) = (each for each in events(HEAL) if each["ph"] == "i")
    assert (instant["name"], instant["ts"]) == ("PeerUnreachableError: x", 1.5e6)


def test_no_records_are_an_empty_trace() -> None:
    assert events() == []
