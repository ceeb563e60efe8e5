"""torchft's Rust code panics, which raises no ``Exception``: the call is a `QuorumError`, and the next one works."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import lighthouse, make_manager
from served_memory import until

from ft_transport.runtime.deadline import Deadline
from manager import LighthouseUnavailableError, QuorumError
from manager.quorum.heartbeat import Heartbeat
from manager.quorum.lighthouse import LighthouseSession
from manager.quorum.reports import Member

pytest.importorskip("torchft")

pytestmark = pytest.mark.usefixtures("quorum_ready")

SECOND = timedelta(seconds=1)
PANIC = r"its Rust code panicked: duration is unrealistically large; check that this process has descriptors"


@contextmanager
def session(address: str) -> Iterator[LighthouseSession]:
    made = LighthouseSession(
        address,
        "a:1",
        connect_timeout=10 * SECOND,
        heartbeat_interval=SECOND / 100,
        heartbeat_timeout=SECOND,
        keys=None,
    )
    try:
        yield made
    finally:
        made.close()


def ask(asking: LighthouseSession, timeout: timedelta) -> tuple[Member, ...]:
    member = Member(replica_id="a:1", addresses=("http://127.0.0.1:1/",), store_address="", step=0, lineage="")
    return asking.quorum(member, timeout=timeout, deadline=Deadline(), shrink_only=False, num_retries=0)


def test_a_request_that_panics_is_a_quorum_error() -> None:
    with lighthouse() as address, session(address) as asking:
        with pytest.raises(QuorumError, match=PANIC) as raised:
            ask(asking, timedelta.max / 2)
        assert type(raised.value.__cause__).__name__ == "PanicException"
        assert [each.replica_id for each in ask(asking, 10 * SECOND)] == ["a:1"]


def test_a_manager_whose_request_panics_goes_on() -> None:
    with lighthouse() as address:
        manager = make_manager(address, "a", quorum_timeout=timedelta.max / 2)
        try:
            manager.register("model", torch.nn.Linear(2, 2))
            with pytest.raises(QuorumError, match=PANIC):
                manager.start_quorum()
            manager.start_quorum(timeout=10 * SECOND)
            assert manager.num_participants() == 1
        finally:
            manager.shutdown()


def test_heartbeats_go_on_after_one_that_panics(caplog: pytest.LogCaptureFixture) -> None:
    with lighthouse() as address, session(address) as beating:
        heartbeat = beating._heartbeat
        assert heartbeat is not None
        heartbeat._timeout = timedelta.max
        until(lambda: "does not answer heartbeats: expected torchft to talk to the Lighthouse" in caplog.text)
        heartbeat._timeout = SECOND
        # A further failure is told in the log only where a beat has reached the Lighthouse in between.
        caplog.clear()
        until(lambda: _fails_again(heartbeat, caplog))


def _fails_again(heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture) -> bool:
    heartbeat._timeout = SECOND if heartbeat._timeout is timedelta.max else timedelta.max
    return "does not answer heartbeats" in caplog.text


def test_a_client_that_gets_no_descriptor_is_a_quorum_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchft import coordination

    def refuse(*_arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(coordination, "LighthouseClient", refuse)
    with (
        lighthouse() as address,
        pytest.raises(LighthouseUnavailableError, match="Too many open files"),
        session(address),
    ):
        pass
