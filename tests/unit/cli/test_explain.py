import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ft_transport.cli.contents import NotFoundError
from ft_transport.cli.explain import explain, summary_of
from ft_transport.cli.main import app
from ft_transport.errors import RecordError
from ft_transport.telemetry.record import Phase, Record, Retry, Transfer, encode_json

RECORD = Record(
    kind="heal",
    begun_unix_s=1_700_000_000.0,
    length_s=10.0,
    outcome="ok",
    replica="r\x1b[31m",
    phases=(Phase(name="quorum", start_s=0.0, length_s=10.0),),
)
FAILED = Record(kind="load", begun_unix_s=1_700_000_001.0, length_s=1.0, outcome="failed", error="OSError: x")


def write(path: Path, *records: Record, end: bytes = b"") -> Path:
    path.write_bytes(b"".join(encode_json(record) + b"\n" for record in records) + end)
    return path


def test_what_a_peer_has_named_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(write(tmp_path / "r", RECORD))])
    assert result.exit_code == 0
    assert "quorum took 10.00 s of 10.00 s (100 %)" in result.output
    assert "\x1b" not in result.output


@pytest.mark.parametrize(("length_s", "of", "is_said"), [(0.9, 1.0, False), (3.0, 10.0, False), (6.0, 10.0, True)])
def test_only_a_long_wait_for_a_quorum_is_for_a_replica_that_is_gone(
    length_s: float, of: float, is_said: bool, tmp_path: Path
) -> None:
    waited = replace(RECORD, length_s=of, phases=(Phase(name="quorum", start_s=0.0, length_s=length_s),))
    result = CliRunner().invoke(app, ["explain", str(write(tmp_path / "r", waited))])
    assert f"quorum took {length_s:.2f} s" in result.output
    assert ("has died" in result.output) is is_said
    assert ("`ft-transport top LIGHTHOUSE`" in result.output) is is_said


def test_a_failure_among_them_is_exit_code_1_and_kinds_are_chosen(tmp_path: Path) -> None:
    path = str(write(tmp_path / "r", RECORD, FAILED))
    assert CliRunner().invoke(app, ["explain", path]).exit_code == 1
    assert CliRunner().invoke(app, ["explain", path, "--kind", "heal"]).exit_code == 0
    assert CliRunner().invoke(app, ["explain", path, "--kind", "save"]).exit_code == 1
    assert CliRunner().invoke(app, ["explain", path, "--kind", "nap"]).exit_code == 2
    result = CliRunner().invoke(app, ["explain", path, "--slowest", "--json"])
    assert json.loads(result.output)["record"]["kind"] == "heal"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = str(write(tmp_path / "r", RECORD, end=b'{"kind": "he'))
    assert CliRunner().invoke(app, ["explain", path]).exit_code == 0


@pytest.mark.parametrize("content", [b"", bytes(4096), b'{"kind": "he'])
def test_a_file_without_a_record_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(content)
    for command in (["explain"], ["trace", "-o", str(tmp_path / "t")]):
        assert CliRunner().invoke(app, [*command, str(tmp_path / "r")]).exit_code == 1
    assert not (tmp_path / "t").exists()


def test_a_replica_without_a_file_of_records_is_named_and_the_others_are_explained(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / "r", RECORD)), str(tmp_path / "missing\x1b[2J"), str(tmp_path)]
    for command in (["explain", "--json"], ["trace", "--json", "-o", str(tmp_path / "t")]):
        result = CliRunner().invoke(app, [*command, *paths])
        assert result.exit_code == 0
        assert "missing\\x1b[2J: No such file or directory" in result.stderr
        assert len(result.stderr.splitlines()) == 2
        assert json.loads(result.stdout)
        none = CliRunner().invoke(app, [*command, *paths[1:]])
        assert isinstance(none.exception, NotFoundError)


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(encode_json(RECORD) + b"\nnonsense\n")
    error = CliRunner().invoke(app, ["explain", str(path)]).exception
    assert isinstance(error, RecordError)
    assert str(error).startswith(f"{path}, line 2: expected a record in JSON")


LARGE = 10**400
SOME = Transfer(peer="a:1", role="source", num_bytes=1 << 30, length_s=1.0, interface="eth0")
TRANSFER = (Phase(name="transfer", start_s=0.0, length_s=10.0),)


@pytest.mark.parametrize(
    "changes",
    [
        {"begun_unix_s": 1e300},
        {"begun_unix_s": -1e300},
        {"length_s": 1e-3, "phases": (Phase(name="lock", start_s=0.0, length_s=1e9),)},
        {"length_s": 1e-300, "phases": (Phase(name="lock", start_s=0.0, length_s=1e300),)},
        {"length_s": -1.0},
        {"phases": TRANSFER, "transfers": (replace(SOME, length_s=0.0), replace(SOME, interface="eth1"))},
        {"phases": TRANSFER, "transfers": (replace(SOME, length_s=1e-300), replace(SOME, interface="eth1"))},
        {"phases": TRANSFER, "transfers": (replace(SOME, length_s=1e300), replace(SOME, length_s=1e-300))},
    ],
    ids=range(8),
)
def test_figures_that_cannot_be_are_told_all_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """The line is as wide as ever: a bar of a billion characters would take all memory."""
    path = str(write(tmp_path / "r", replace(RECORD, **changes)))
    for command in (["explain"], ["explain", "--json"], ["trace", "-o", str(tmp_path / "t")]):
        result = CliRunner().invoke(app, [*command, path])
        assert result.exit_code == 0, result.exception
        assert len(result.output) < 3_000


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "heal", "more": ' + b"[" * 9_000,
        *(
            json.dumps({**asdict(RECORD), **changes}).encode()
            for changes in (
                {"num_bytes": LARGE},
                {"step": LARGE},
                {"group_rank": -LARGE},
                {"transfers": [{**asdict(SOME), "num_bytes": LARGE}]},
            )
        ),
    ],
    ids=["brackets", "size", "step", "rank", "transfer"],
)
def test_brackets_and_numbers_that_nothing_has_are_no_record(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(line + b"\n")
    for command in (["explain"], ["trace", "-o", str(tmp_path / "t")]):
        result = CliRunner().invoke(app, [*command, str(tmp_path / "r")])
        assert isinstance(result.exception, RecordError)


def test_the_trace_is_written(tmp_path: Path) -> None:
    path, trace = write(tmp_path / "r", RECORD), tmp_path / "trace.json"
    assert CliRunner().invoke(app, ["trace", str(path), "-o", str(trace)]).exit_code == 0
    assert any(event["name"] == "quorum" for event in json.loads(trace.read_text())["traceEvents"])


def transfer(
    peer: str = "a:1", *, interface: str = "eth0", rate: float = 100e6, num_bytes: int = 1_000_000_000
) -> Transfer:
    return Transfer(
        peer=peer,
        role="source",
        num_bytes=num_bytes,
        length_s=num_bytes / rate,
        local_address="10.0.0.2",
        peer_address="10.0.0.1:1",
        interface=interface,
        num_connections=1,
    )


def record(*transfers: Transfer, retries: tuple[Retry, ...] = (), error: str = "", **lengths: float) -> Record:
    phases, start_s = [], 0.0
    for name, length_s in lengths.items():
        phases.append(Phase(name=name, start_s=start_s, length_s=length_s))
        start_s += length_s
    return Record(
        kind="heal",
        begun_unix_s=0.0,
        length_s=start_s,
        outcome="failed" if error else "ok",
        replica="r",
        step=4,
        num_bytes=sum(each.num_bytes for each in transfers),
        error=error,
        phases=tuple(phases),
        transfers=transfers,
        retries=retries,
    )


def test_what_failed_is_told_first_and_an_empty_record_is_explained_too() -> None:
    findings = explain(record(error="FetchFailedError: all gone", manifest=5.0))
    assert findings[0].text == "heal failed: FetchFailedError: all gone"
    assert explain(Record(kind="load", begun_unix_s=0.0, length_s=0.0, outcome="ok")) == ()


def test_the_summary_says_what_it_was_and_how_long_it_took() -> None:
    assert summary_of(record(transfer(), quorum=0.5, transfer=10.0)) == "heal of r at step 4: ok in 10.50 s, 1.00 GB"


@pytest.mark.parametrize(
    "name", ["quorum", "rendezvous", "lock", "manifest", "plan", "verify", "load", "compare", "follow", "first_step"]
)
def test_the_phase_that_took_long_is_named_first_with_what_to_do(name: str) -> None:
    findings = explain(record(transfer(num_bytes=100_000_000), **{"transfer": 1.0, name: 9.0}))
    assert findings[0].text.startswith(f"{name} took 9.00 s of 10.00 s (90 %): ")
    assert findings[0].remedy


def test_an_interface_much_slower_than_another_one_was_earlier_is_named_with_the_setting() -> None:
    earlier = record(transfer(interface="ib0", rate=400e6), transfer=2.5)
    findings = explain(record(transfer(interface="eth1", rate=10e6), transfer=100.0), others=[earlier])
    (found,) = (each for each in findings if each.remedy)
    assert "over eth1" in found.text
    assert "over ib0" in found.text
    assert "40 times as fast" in found.text
    assert "FT_TRANSPORT_ADVERTISE" in found.remedy
    assert found.cost_s == pytest.approx(97.5)


@pytest.mark.parametrize(("interface", "rate"), [("ib0", 200e6), ("lo", 5e9)])
def test_an_interface_of_about_the_same_rate_and_the_loopback_are_no_finding(interface: str, rate: float) -> None:
    earlier = record(transfer(interface=interface, rate=rate), transfer=1e9 / rate)
    assert not [each for each in explain(record(transfer(), transfer=10.0), others=[earlier]) if each.remedy]


def test_a_source_much_slower_than_another_one_is_named() -> None:
    findings = explain(record(transfer("a:1", rate=100e6), transfer("b:1", rate=5e6), transfer=200.0))
    (found,) = (each for each in findings if each.remedy)
    assert found.text == "b:1 sent 5.0 MB/s over eth0; a:1 sent 100.0 MB/s over the same interface"


def test_a_link_that_was_full_is_named_where_this_host_has_a_faster_one() -> None:
    findings = explain(
        record(transfer(rate=11.8e6), transfer=85.0), link_bits_per_s={"eth0": 1e8, "eth1": 1e10, "lo": 1e12}
    )
    (found,) = (each for each in findings if each.remedy)
    assert "eth0 is a link of 100 Mbit/s" in found.text
    assert "eth1" in found.remedy


def test_retries_are_told_by_cause_and_peer() -> None:
    retries = tuple(
        Retry(at_s=at_s, cause="PeerUnreachableError: nobody there", peer="a:1") for at_s in (1.0, 2.5, 4.0)
    )
    findings = explain(record(transfer(num_bytes=1000), retries=retries, manifest=5.0))
    (found,) = (each for each in findings if "retried" in each.text)
    assert found.text == (
        "retried with a:1 3 times, 1.0 to 4.0 s after the beginning: PeerUnreachableError: nobody there"
    )
    assert "ft-transport doctor" in found.remedy
