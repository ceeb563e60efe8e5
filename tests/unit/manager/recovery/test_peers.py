"""One replica recovers from another: everything is equal afterwards, or the replica refuses to step."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from lock_holders import holders_of
from state_equality import exact
from state_tools import file_of_state, manifest_of
from transport_settings import settings_of

from ft_transport import (
    FetchFailedError,
    FetchProgress,
    FetchTimeout,
    HTTPTransport,
    TransportError,
)
from ft_transport.state.restore import Restore
from manager import LockTimeoutError, Manager, RandomState, RegistryError, StateTornError
from manager.state.compatibility import check_fit
from manager.state.registry import StateRegistry

_TIMEOUT = timedelta(seconds=20)


class Loader:
    """Python counters, such as a data loader keeps."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Replica:
    """All that a trainer has, on a transport of its own."""

    def __init__(
        self, seed: int, *, width: int = 64, on_progress: Callable[[FetchProgress], None] | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.seen, self.local = Loader(), Loader()
        settings = settings_of(
            host="127.0.0.1",
            advertise="127.0.0.1",
            chunk_bytes=1 << 16,
            max_failures=1,
            stall_timeout=timedelta(seconds=5),
            same_host=False,
            on_progress=on_progress,
        )
        self.transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, num_chunks=1, settings=settings)
        self.manager = Manager(checkpoint_transport=self.transport, timeout=_TIMEOUT)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "seen": self.seen}
        for key, part in parts.items():
            self.manager.register(key, part)
        self.manager.register("rng", RandomState())
        self.manager.register("local", self.local, scope="local")
        self.attachment = self.manager.attach(self.optimizer)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            self.manager.start_step(self.manager.current_step())
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 8)).square().mean() * random.random() * np.random.rand()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.seen.position += 4
            self.local.position += 4
            self.manager.load_state_dict({"step": self.manager.current_step() + 1})
            losses.append(float(loss.detach()))
        return losses

    def snapshot(self) -> str:
        self.manager.snapshot().result(_TIMEOUT.total_seconds())
        return self.transport.metadata()

    def addresses(self) -> dict[str, int]:
        moments = self.optimizer.state_dict()["state"]
        tensors = dict(self.model.state_dict())
        tensors.update({f"{index}.{name}": value for index, state in moments.items() for name, value in state.items()})
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.fixture
def replicas() -> Iterator[Callable[..., Replica]]:
    with ExitStack() as stack:

        def make(seed: int, **options: Any) -> Replica:
            replica = Replica(seed, **options)
            stack.callback(replica.manager.shutdown)
            return replica

        yield make


@pytest.mark.parametrize("steps_before", [0, 3])
def test_everything_replicated_is_equal_afterwards(replicas: Callable[..., Replica], steps_before: int) -> None:
    ours, peer = replicas(0), replicas(1)
    ours.train(steps_before)
    peer.train(5)
    at_five = exact(peer.manager.replica_state())
    address = peer.snapshot()
    expected_losses = peer.train(3)
    addresses = ours.addresses()

    recovery = ours.manager.recover(address, 5)

    assert (recovery.step, recovery.source, ours.manager.current_step()) == (5, address, 5)
    assert exact(ours.manager.replica_state()) == at_five
    assert ours.local.position == 4 * steps_before
    assert ours.seen.position == 20
    # Received into the tensors that were there; a fresh optimizer has none of its own yet.
    assert addresses.items() <= ours.addresses().items()
    assert len(addresses) == 9 + (18 if steps_before else 0)
    assert ours.train(3) == expected_losses
    assert exact(ours.manager.replica_state()) == exact(peer.manager.replica_state())


def test_a_formatter_that_writes_records_as_json_can_write_a_recovery(
    replicas: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    source, recovering = replicas(0), replicas(1)
    with caplog.at_level(logging.INFO, "manager"):
        recovery = recovering.manager.recover(source.snapshot(), 0)
    [said] = [record for record in caplog.records if "recovered step" in record.msg]
    assert json.loads(json.dumps(vars(said)["recovery"])) == {"step": recovery.step, "source": recovery.source}


def test_after_recovering_nobody_is_served_the_state_of_before(replicas: Callable[..., Replica]) -> None:
    ours, peer, third = replicas(0), replicas(1), replicas(2)
    ours.snapshot()
    recovery = ours.manager.recover(peer.snapshot(), 0)
    assert recovery.step == 0
    # The step is 0 as before, but not the state.
    assert ours.transport.server.newest_step() == 0
    asking = threading.Thread(target=third.manager.recover, args=(ours.transport.metadata(), "latest"))
    asking.start()
    while asking.is_alive():
        ours.manager.start_step(0)
        asking.join(0.01)
    assert ours.transport.server.newest_sequence() > 1, "the snapshot of before answered nobody"
    assert exact(third.model.state_dict()) == exact(peer.model.state_dict())


def _kill_after_the_first_chunk(source: Replica) -> Callable[[FetchProgress], None]:
    def kill(_progress: FetchProgress) -> None:
        source.transport.shutdown()

    return kill


def _is_nan(model: torch.nn.Module) -> bool:
    return all(bool(parameter.isnan().all()) for parameter in model.parameters())


def test_a_source_that_dies_midway_leaves_a_replica_that_refuses_to_step(replicas: Callable[..., Replica]) -> None:
    # Far more than the sockets between them can hold, so that the source cannot have sent everything by then.
    width = 1 << 18
    dying, healthy = replicas(1, width=width), replicas(2, width=width)
    ours = replicas(0, width=width, on_progress=_kill_after_the_first_chunk(dying))
    healthy.train(1)
    address = dying.snapshot()

    with pytest.raises(TransportError) as caught:
        ours.manager.recover(address, 0)

    assert isinstance(caught.value, FetchFailedError)
    assert caught.value.destination_touched
    assert _is_nan(ours.model)
    for refuses in (ours.optimizer.step, lambda: ours.manager.start_step(1), ours.manager.snapshot):
        with pytest.raises(StateTornError, match="part of the state of step 0"):
            refuses()
    assert not holders_of(ours.manager)

    ours.transport._client._settings = (
        healthy.transport._client._settings
    )  # the callback that kills is not needed any more
    recovery = ours.manager.recover(healthy.snapshot())
    assert recovery.step == 1
    for mine, theirs in zip(ours.model.parameters(), healthy.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ours.train(1)


def test_a_refusal_after_an_attempt_that_landed_bytes_leaves_a_replica_that_refuses_to_step(
    replicas: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt's snapshot was replaced, and the check refuses what comes next."""
    ours, healthy = replicas(0), replicas(1)
    refused = RegistryError("expected the state of step 5, got that of step 6")

    def fetch(*_arguments: Any, **_keywords: Any) -> Any:
        raise refused

    monkeypatch.setattr(ours.transport, "fetch", fetch)
    with pytest.raises(RegistryError):
        ours.manager.recover(healthy.snapshot())
    ours.train(1)
    refused.destination_touched = True  # type: ignore[attr-defined]
    with pytest.raises(RegistryError):
        ours.manager.recover(healthy.snapshot())
    with pytest.raises(StateTornError, match="got that of step 6"):
        ours.optimizer.step()


def test_a_source_that_is_not_there_costs_nothing(replicas: Callable[..., Replica]) -> None:
    ours, dead = replicas(0), replicas(1)
    before = exact(ours.manager.replica_state())
    dead.transport.shutdown()
    with pytest.raises(TransportError):
        ours.manager.recover(dead.transport.metadata(), "latest", timedelta(seconds=0.3))
    assert exact(ours.manager.replica_state()) == before
    ours.train(1)


def test_a_failing_state_function_stops_a_recovery_before_it_begins(replicas: Callable[..., Replica]) -> None:
    ours, peer = replicas(0), replicas(1)
    broken = [True]

    def state() -> int:
        if broken:
            raise RuntimeError("not ready")
        return 0

    ours.manager.register_state_dict_fn("more", lambda _: None, state)
    peer.manager.register_state_dict_fn("more", lambda _: None, lambda: 0)
    address = peer.snapshot()
    with pytest.raises(RegistryError, match=r"state_dict of 'more'.*RuntimeError: not ready"):
        ours.manager.recover(address, 0)
    broken.clear()
    ours.train(1)
    ours.manager.recover(address, 0)


def test_a_peer_with_other_parts_is_refused_and_said_so(replicas: Callable[..., Replica]) -> None:
    ours, peer, good = replicas(0), replicas(1), replicas(2)
    peer.manager.register("more", Loader())
    with pytest.raises(RegistryError, match="'more'"):
        ours.manager.recover(peer.snapshot(), 0)
    ours.train(1)  # Nothing was received.
    ours.manager.recover(good.snapshot(), 0)
    ours.train(1)


def _widen(peer: Replica) -> None:
    peer.model.double()


def _drop_a_bias(peer: Replica) -> None:
    peer.model[0].register_parameter("bias", None)


def _add_a_buffer(peer: Replica) -> None:
    peer.model.register_buffer("more", torch.zeros(3))


def _reshape(peer: Replica) -> None:
    peer.model[2].weight = torch.nn.Parameter(torch.zeros(8, 63))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_widen, r"0\.weight is float32\[64, 8\] here and float64\[64, 8\] there.* and \d more; nothing was received"),
        (_drop_a_bias, r"missing: none, unexpected: 0\.bias; nothing was received"),
        (_add_a_buffer, r"missing: more, unexpected: none; nothing was received"),
        (_reshape, r"2\.weight is float32\[8, 63\] here and float32\[8, 64\] there; nothing was received"),
    ],
)
def test_a_state_that_would_not_fit_exactly_is_refused_before_it_is_received(
    replicas: Callable[..., Replica], change: Callable[[Replica], None], message: str
) -> None:
    ours, peer = replicas(0), replicas(1)
    if change is not _widen:
        change(ours)
    else:
        change(peer)
    before = exact(ours.model.state_dict())
    with pytest.raises(RegistryError, match=message):
        ours.manager.recover(peer.snapshot(), 0)
    assert exact(ours.model.state_dict()) == before
    ours.manager.start_step(0)


_W, _B = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))


def _adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([_W, _B], lr=0.1)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (_adamw, _adamw, None),
        (
            lambda: torch.optim.SGD([_W, _B]),
            _adamw,
            "'part', but the peer's state lacks momentum, dampening, nesterov; nothing",
        ),
        (
            _adamw,
            lambda: torch.optim.AdamW([{"params": [_W]}, {"params": [_B]}]),
            r"groups have \[2\] parameters here and \[1, 1\] there; nothing was received",
        ),
        (
            _adamw,
            lambda: torch.optim.AdamW([_W]),
            r"groups have \[2\] parameters here and \[1\] there; nothing was received",
        ),
        (
            lambda: torch.optim.lr_scheduler.StepLR(_adamw(), 3),
            lambda: torch.optim.lr_scheduler.StepLR(_adamw(), 2),
            None,
        ),
        (
            lambda: torch.optim.lr_scheduler.StepLR(_adamw(), 3),
            lambda: torch.optim.lr_scheduler.CosineAnnealingLR(_adamw(), 3),
            "'part', but the peer's state lacks step_size, gamma; nothing was received",
        ),
    ],
    ids=["same", "other optimizer", "more groups", "fewer parameters", "other step", "other scheduler"],
)
def test_optimizers_and_schedulers_of_another_make_are_refused(
    ours: Callable[[], object], theirs: Callable[[], object], message: str | None
) -> None:
    own, peer = StateRegistry(), StateRegistry()
    own.register_object("part", ours())
    peer.register_object("part", theirs())
    own_state = {"user": own.state_dict(), "manager": {}}
    file = file_of_state({"user": peer.state_dict(), "manager": {}})
    incoming = Restore(manifest_of(file), into=own_state).incoming
    if message is None:
        check_fit(incoming, own, own_state)
    else:
        with pytest.raises(RegistryError, match=message):
            check_fit(incoming, own, own_state)


def test_a_module_that_loads_by_rules_of_its_own_is_not_asked_for_the_same_names() -> None:
    class Lenient(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, *_args: Any, **_kwargs: Any) -> Any:
            return super().load_state_dict(state_dict, strict=False)

    ours, theirs = StateRegistry(), StateRegistry()
    ours.register_object("model", Lenient(2, 2, bias=False))
    theirs.register_object("model", Lenient(2, 2))
    own_state = {"user": ours.state_dict(), "manager": {}}
    file = file_of_state({"user": theirs.state_dict(), "manager": {}})
    check_fit(Restore(manifest_of(file), into=own_state).incoming, ours, own_state)


def test_a_peer_that_is_no_manager_is_refused(replicas: Callable[..., Replica]) -> None:
    ours, peer = replicas(0), replicas(1)
    for step, state in enumerate((["a", "list"], {"user": {}}, {"user": {}, "manager": {"step": "one"}})):
        peer.transport.send_checkpoint([0], step, state, _TIMEOUT)
        with pytest.raises(RegistryError, match=r"expected a replica's state|exactly the keys"):
            ours.manager.recover(peer.transport.metadata(), step)


def test_the_wait_for_the_lock_counts_against_the_deadline(
    replicas: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, peer = replicas(0), replicas(1)
    address = peer.snapshot()
    with ThreadPoolExecutor(1) as elsewhere:
        section = elsewhere.submit(lambda: ours.manager.reading("a copy").__enter__()).result()
    with pytest.raises(LockTimeoutError, match=r"receiving step 0 from http.*'a copy'"):
        ours.manager.recover(address, 0, timedelta(milliseconds=50))
    left: list[timedelta] = []
    fetch = ours.transport.fetch

    def note(*args: Any, timeout: FetchTimeout, **kwargs: Any) -> Any:
        left.append(timeout.total)
        return fetch(*args, timeout=timeout, **kwargs)

    monkeypatch.setattr(ours.transport, "fetch", note)
    opening = threading.Timer(0.1, section.release)
    opening.start()
    ours.manager.recover(address, 0, _TIMEOUT)
    opening.join()
    assert left[0] < _TIMEOUT - timedelta(seconds=0.05)
