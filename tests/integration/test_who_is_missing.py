"""A replica says whom it waits for, whom it cannot be found by, and who has its name: with torchft's own Lighthouse."""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta
from functools import partial

import pytest
from quorum_threads import lighthouse, make_manager, run_replicas
from torchft.coordination import LighthouseClient

from manager import ConfigError, ManagerConfig, QuorumError
from manager.quorum.members import read_status

SHORT = timedelta(seconds=0.4)

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(60)]


make = partial(make_manager, has_part=True)


def test_a_quorum_that_does_not_come_names_who_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    with lighthouse(min_replicas=2) as address:
        LighthouseClient(address, timedelta(seconds=5)).heartbeat("late:1")
        # A stall is told after half of the timeout.
        manager = make(address, "early", timeout=SHORT)
        try:
            with pytest.raises(QuorumError) as caught:
                manager.start_quorum(timeout=2 * SHORT)
        finally:
            manager.shutdown()
    stalls = [record.getMessage() for record in caplog.records if "for more than" in record.getMessage()]
    assert len(stalls) == 1
    for text in (str(caught.value), stalls[0]):
        assert "1 of 2 live replicas have asked; alive without asking: late:1" in text
        assert "need min_replicas 2" in text
    assert "Timeout expired" not in str(caught.value)
    assert stalls[0].count("thread '") == 1
    assert "in test_a_quorum_that_does_not_come" in stalls[0]


def test_a_replica_that_has_fallen_silent_is_named() -> None:
    with lighthouse(min_replicas=1, heartbeat_timeout_ms=100) as address:
        LighthouseClient(address, timedelta(seconds=5)).heartbeat("gone:1")
        deadline_s = time.monotonic() + 10
        status = read_status(address, 1.0)
        while (status is None or not status.silent) and time.monotonic() < deadline_s:
            status = read_status(address, 1.0)
    assert status is not None
    assert "without heartbeats: gone:1 for 0 s" in status.missing("own:1")


def test_a_stranger_s_name_keeps_nobody_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reaches the Lighthouse may send heartbeats, by any name; a job token does not change that."""
    caplog.set_level(logging.INFO)
    with lighthouse(min_replicas=2) as address:
        for name in (" " * 60_000 + "a\nb", "\x1b[2J\u202e"):
            LighthouseClient(address, timedelta(seconds=5)).heartbeat(name)
        began_s = time.process_time()
        manager = make(address, "early", timeout=SHORT)
        try:
            with pytest.raises(QuorumError) as caught:
                manager.start_quorum(timeout=2 * SHORT)
        finally:
            manager.shutdown()
        assert time.process_time() - began_s < 10
    for text in (str(caught.value), *(record.getMessage().partition("\n")[0] for record in caplog.records)):
        assert text.isprintable()
        assert len(text) < 2_000
    assert "1 of 3 live replicas have asked" in str(caught.value)


def test_two_live_replicas_with_one_name_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with lighthouse(min_replicas=2) as address:
        managers = [make(address, "trainer", min_replica_size=2) for _ in range(2)]
        try:
            for _ in range(2):
                run_replicas(*(manager.start_quorum for manager in managers))
                run_replicas(*(manager.should_commit for manager in managers))
        finally:
            for manager in managers:
                manager.shutdown()
    warnings = [record.getMessage() for record in caplog.records if "another live replica has" in record.getMessage()]
    assert len(warnings) == 2
    assert all(f"process {os.getpid()} on {socket.gethostname()}: give every" in warning for warning in warnings)


def test_a_replica_with_a_lighthouse_of_its_own_is_told_that_it_is_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with lighthouse() as address:
        monkeypatch.setattr("manager.quorum.membership.embedded_lighthouse", lambda **_: address)
        make(None, "alone").shutdown()  # type: ignore[arg-type] # no address
    (warning,) = [record for record in caplog.records if "no other replica can find this one" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "set TORCHFT_LIGHTHOUSE=http://host:port" in warning.getMessage()


def test_an_address_without_a_scheme_is_completed() -> None:
    with lighthouse() as address:
        manager = make(address.removeprefix("http://"), "a")
        manager.start_quorum()
        assert manager.should_commit()
        manager.shutdown()


@pytest.mark.parametrize("address", ["host", "http://host", "ftp://host:1", "http://:80", "host:port"])
def test_an_address_that_cannot_work_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port as the address of the Lighthouse"):
        ManagerConfig(lighthouse_addr=address).with_environment({})
