from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import network_namespaces
from benchmarks.fleet_runs import ALONE, sources, transfer
from benchmarks.network_namespaces import Link, network
from benchmarks.replicas.fleet_hosts import FleetState
from benchmarks.states import digest_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("can_make_networks")]

MIB = 1 << 20
FAST = Link(up=800e6, down=800e6)


@pytest.fixture
def can_make_networks() -> None:
    reason = network_namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)


def own_namespaces() -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"ft-bench-{os.getpid()}-*")]


class TestNetwork:
    def test_nothing_is_left_of_it_after_an_error(self) -> None:
        def fail() -> None:
            with network([FAST] * 2):
                assert len(own_namespaces()) == 3
                raise ValueError("of the benchmark")

        with pytest.raises(ValueError, match="of the benchmark"):
            fail()
        assert own_namespaces() == []

    def test_what_a_killed_one_left_is_removed_by_the_next(self) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        left_behind = f"ft-bench-{ended.pid}-0"
        subprocess.run(["ip", "netns", "add", left_behind], check=True)
        with network([FAST]):
            assert not Path("/run/netns", left_behind).exists()


@pytest.mark.long
class TestTransfer:
    def test_receivers_share_the_link_of_their_source(self, fork_server: None) -> None:
        state = FleetState("whole", 8 * MIB)
        up = 200e6
        with network([Link(up=up, down=800e6), FAST, FAST]) as made:
            source, *receivers = made.hosts
            with sources(ALONE, [source], state) as served:
                addresses = [address for _, address in served.values()]
                # It compares what has come with the digest.
                outcome = transfer(made, ALONE, addresses, receivers, state, digest=digest_of(state.of_source()))
        assert list(outcome.done) == receivers
        assert outcome.seconds > 0.9 * 2 * state.num_bytes * 8 / up
        assert 2.0 < outcome.traffic[source].sent_bytes / state.num_bytes < 2.2

    def test_another_state_than_was_sent_is_noticed(self, fork_server: None) -> None:
        state = FleetState("whole", 8 * MIB)
        with network([FAST, FAST]) as made:
            source, receiver = made.hosts
            with sources(ALONE, [source], state) as served:
                addresses = [address for _, address in served.values()]
                with pytest.raises(RuntimeError, match="another state"):
                    transfer(made, ALONE, addresses, [receiver], state, digest="of another one")
