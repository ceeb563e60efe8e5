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

from manager import LighthouseUnavailableError, QuorumError
from manager.quorum.heartbeat import Heartbeat
from manager.quorum.lighthouse import LighthouseSession

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
        min_replicas=1,
        stand_in=None,
    )
    try:
        yield made
    finally:
        made.close()


def test_a_manager_whose_request_panics_goes_on() -> None:
    with lighthouse() as address:
        manager = make_manager(address, "a", quorum_timeout=timedelta.max / 2)
        try:
            manager.register("model", torch.nn.Linear(2, 2))
            with pytest.raises(QuorumError, match=PANIC) as raised:
                manager.start_quorum()
            assert type(raised.value.__cause__).__name__ == "PanicException"
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
