import pytest

from ft_transport.telemetry.explain import explain, phase_lengths
from ft_transport.telemetry.record import Phase, Record, Retry, Transfer


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


def test_the_summary_says_what_it_was_and_how_long_it_took() -> None:
    told = explain(record(transfer(), quorum=0.5, transfer=10.0))
    assert told.summary == "heal of r at step 4: ok in 10.50 s, 1.00 GB"


@pytest.mark.parametrize(
    "name", ["quorum", "rendezvous", "lock", "manifest", "plan", "verify", "load", "compare", "first_step"]
)
def test_the_phase_that_took_long_is_named_first_with_what_to_do(name: str) -> None:
    told = explain(record(transfer(num_bytes=100_000_000), **{"transfer": 1.0, name: 9.0}))
    assert told.findings[0].text.startswith(f"{name} took 9.00 s of 10.00 s (90 %): ")
    assert told.findings[0].remedy


def test_an_interface_much_slower_than_another_one_was_earlier_is_named_with_the_setting() -> None:
    earlier = record(transfer(interface="ib0", rate=400e6), transfer=2.5)
    told = explain(record(transfer(interface="eth1", rate=10e6), transfer=100.0), others=[earlier])
    (found,) = (each for each in told.findings if each.remedy)
    assert "over eth1" in found.text
    assert "over ib0" in found.text
    assert "40 times as much" in found.text
    assert "FT_TRANSPORT_ADVERTISE" in found.remedy
    assert found.cost_s == pytest.approx(97.5)


def test_interfaces_of_about_the_same_rate_are_no_finding() -> None:
    earlier = record(transfer(interface="ib0", rate=200e6), transfer=5.0)
    told = explain(record(transfer(rate=100e6), transfer=10.0), others=[earlier])
    assert not [each for each in told.findings if each.remedy]


def test_the_loopback_is_no_way_to_compare_with() -> None:
    earlier = record(transfer(interface="lo", rate=5e9), transfer=0.2)
    assert not [each for each in explain(record(transfer(), transfer=10.0), others=[earlier]).findings if each.remedy]


def test_a_source_much_slower_than_another_one_is_named() -> None:
    told = explain(record(transfer("a:1", rate=100e6), transfer("b:1", rate=5e6), transfer=200.0))
    (found,) = (each for each in told.findings if each.remedy)
    assert found.text == "b:1 sent 5.0 MB/s over eth0; a:1 sent 100.0 MB/s over the same interface"


def test_a_link_that_was_full_is_named_where_this_host_has_a_faster_one() -> None:
    told = explain(
        record(transfer(rate=11.8e6), transfer=85.0), link_bits_per_s={"eth0": 1e8, "eth1": 1e10, "lo": 1e12}
    )
    (found,) = (each for each in told.findings if each.remedy)
    assert "eth0 is a link of 100 Mbit/s" in found.text
    assert "eth1" in found.remedy


def test_retries_are_told_by_cause_and_peer() -> None:
    retries = tuple(
        Retry(at_s=at_s, cause="PeerUnreachableError: nobody there", peer="a:1") for at_s in (1.0, 2.5, 4.0)
    )
    told = explain(record(transfer(num_bytes=1000), retries=retries, manifest=5.0))
    (found,) = (each for each in told.findings if "tried again" in each.text)
    assert found.text == (
        "tried again with a:1 3 times, 1.0 to 4.0 s after the beginning: PeerUnreachableError: nobody there"
    )
    assert "ft-transport doctor" in found.remedy


def test_what_failed_is_told_first() -> None:
    told = explain(record(error="FetchFailedError: all gone", manifest=5.0))
    assert told.findings[0].text == "it failed: FetchFailedError: all gone"


def test_phases_of_one_name_are_summed_up() -> None:
    phases = tuple(Phase(name=name, start_s=0.0, length_s=1.0) for name in ("manifest", "transfer", "manifest"))
    assert phase_lengths(Record(kind="heal", begun_unix_s=0, length_s=3, outcome="ok", phases=phases)) == {
        "manifest": 2.0,
        "transfer": 1.0,
    }


def test_an_empty_record_is_explained_too() -> None:
    assert explain(Record(kind="load", begun_unix_s=0.0, length_s=0.0, outcome="ok")).findings == ()
