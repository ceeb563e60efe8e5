"""The manager of one replica: what it registers, locks, loads, refuses, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from lock_holders import can_read, elsewhere
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ft_transport import HTTPTransport, TransportError, TransportSettings
from manager import (
    LockTimeoutError,
    Manager,
    ManagerError,
    OptimizerAttachment,
    RegistryError,
    StateTornError,
)

_LONG_S = 20.0
_NOW = timedelta(0)


class Counter:
    """Anything with the two methods, and a switch that makes loading fail."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.error: Exception | None = None

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.error is not None:
            raise self.error
        self.value = state["value"]


def _state(step: int = 5, **user: Any) -> dict[str, Any]:
    return {"user": user, "manager": {"step": step, "batches_committed": 0, "lineage": ""}}


@pytest.fixture
def manager() -> Manager:
    return Manager(timeout=timedelta(seconds=_LONG_S))


@pytest.fixture
def transport() -> HTTPTransport[Any]:
    """For ``serving``, which shuts it down."""
    return HTTPTransport(settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))


@pytest.fixture
def serving(transport: HTTPTransport[Any]) -> Iterator[Manager]:
    manager = Manager(checkpoint_transport=transport, timeout=timedelta(seconds=_LONG_S))
    yield manager
    manager.shutdown()


# ----------------------------------------------------------------------------------------------- registering


def test_functions_are_registered_in_torchfts_order(manager: Manager) -> None:
    loaded: list[Any] = []
    manager.register_state_dict_fn("part", loaded.append, lambda: "live")
    assert manager.replica_state() == _state(0, part="live")
    manager.load(_state(part="received"))
    assert loaded == ["received"]
    assert manager.current_step() == 5


def test_functions_given_to_the_constructor_are_registered_as_default() -> None:
    loaded: list[Any] = []
    manager = Manager(load_state_dict=loaded.append, state_dict=lambda: "live")
    assert manager.replica_state()["user"] == {"default": "live"}
    manager.load(_state(default="received"))
    assert loaded == ["received"]
    with pytest.raises(ValueError, match="neither"):
        Manager(load_state_dict=loaded.append)
    with pytest.raises(ValueError, match="neither"):
        Manager(state_dict=dict)


def test_objects_are_registered_by_their_methods(manager: Manager) -> None:
    counter = Counter(3)
    manager.register("counter", counter)
    assert manager.replica_state()["user"] == {"counter": {"value": 3}}
    with pytest.raises(TypeError, match="no load_state_dict"):
        manager.register("object", object())
    with pytest.raises(RegistryError, match="'counter', which is registered already as replicated") as caught:
        manager.register("counter", Counter(), scope="local")
    assert caught.value.keys == ("counter",)
    counter.value = 4
    assert manager.replica_state()["user"] == {"counter": {"value": 4}}
    with pytest.raises(RegistryError, match="'counter'"):
        manager.register_state_dict_fn("counter", counter.load_state_dict, counter.state_dict)


def test_local_state_is_neither_served_nor_loaded(manager: Manager) -> None:
    loader = Counter(7)
    manager.register("loader", loader, scope="local")
    manager.register("counter", Counter())
    assert manager.replica_state()["user"] == {"counter": {"value": 0}}
    manager.load(_state(counter={"value": 1}))
    assert loader.value == 7
    with pytest.raises(RegistryError, match=r"unexpected: \['loader'\]"):
        manager.load(_state(counter={"value": 1}, loader={"value": 1}))


def test_state_that_asks_for_the_training_thread_is_not_touched_by_another(manager: Manager) -> None:
    counter = Counter(1)
    manager.register("anywhere", Counter())
    manager.register("counter", counter, on_training_thread=True)
    assert manager.replica_state()["user"]["counter"] == {"value": 1}
    manager.start_step(0)
    good = _state(anywhere={"value": 2}, counter={"value": 2})
    for use in (manager.replica_state, lambda: manager.load(good)):
        with pytest.raises(ManagerError, match="'counter'") as caught:
            elsewhere(use)
        assert "anywhere" not in str(caught.value)
    assert counter.value == 1
    manager.load(good)
    assert counter.value == 2


def test_a_snapshot_from_another_thread_does_not_make_it_the_training_thread(serving: Manager) -> None:
    serving.register("counter", Counter(), on_training_thread=True)
    serving.start_step(0)
    with pytest.raises(ManagerError):
        elsewhere(serving.snapshot)
    serving.snapshot().result(_LONG_S)


# ----------------------------------------------------------------------------------------------- the lock


def test_readers_share_and_keep_writers_out(manager: Manager) -> None:
    def write() -> None:
        with manager.writing("probe", _NOW):
            pass

    with manager.reading("one"), manager.reading("two"), manager.read_lock(_NOW):
        assert can_read(manager)
        with pytest.raises(LockTimeoutError) as caught:
            elsewhere(write)
        assert {holder.what for holder in caught.value.holders} == {"one", "two", "taking a snapshot"}
    elsewhere(write)


def test_a_snapshot_in_a_disallow_section_of_the_trainer_is_taken_at_once(
    serving: Manager, transport: HTTPTransport[Any]
) -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = torch.optim.SGD([weight])
    serving.register_state_dict_fn("weight", weight.data.copy_, lambda: weight)
    with serving.attach(optimizer):
        serving.disallow_state_dict_read()
        future = serving.snapshot(1)
        with torch.no_grad():
            weight.fill_(1)
        serving.allow_state_dict_read()
        future.result(_LONG_S)
    received = transport.fetch(transport.metadata(), 1)
    assert not received.state["user"]["weight"].any()


# ----------------------------------------------------------------------------------------------- loading


def test_a_reader_never_sees_half_of_a_load(manager: Manager) -> None:
    values = {"first": 0, "second": 0}
    between, seen = threading.Event(), []

    def load_second(value: int) -> None:
        between.set()
        # The reader is let to try while the load is in the middle.
        seen.append(can_read(manager))
        values["second"] = value

    manager.register_state_dict_fn("first", lambda value: values.update(first=value), lambda: values["first"])
    manager.register_state_dict_fn("second", load_second, lambda: values["second"])

    def read() -> dict[str, int]:
        assert between.wait(_LONG_S)
        with manager.reading("copy"):
            return dict(values)

    copies: list[dict[str, int]] = []
    reader = threading.Thread(target=lambda: copies.append(read()), daemon=True)
    reader.start()
    manager.load(_state(first=1, second=1))
    reader.join(_LONG_S)
    assert seen == [False]
    assert copies == [{"first": 1, "second": 1}]


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (_state(first={"value": 1}), r"missing: \['second'\]"),
        (_state(first={"value": 1}, second={"value": 1}, third=0), r"unexpected: \['third'\]"),
        ({"manager": {"step": 1}}, "'user'"),
        ({"user": {"first": {"value": 1}, "second": {"value": 1}}}, "'manager'"),
        ({"user": {"first": {"value": 1}, "second": {"value": 1}}, "manager": {}}, "step number"),
        (["user", "manager"], "'user'"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(manager: Manager, state: Any, complaint: str) -> None:
    first, second = Counter(), Counter()
    manager.register("first", first)
    manager.register("second", second)
    with pytest.raises(RegistryError, match=complaint):
        manager.load(state)
    assert (first.value, second.value, manager.current_step()) == (0, 0, 0)
    manager.start_step(0)
    assert can_read(manager)


def _optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


def test_a_load_that_fails_midway_stops_the_training_until_one_succeeds(serving: Manager) -> None:
    first, second = Counter(), Counter()
    serving.register("first", first)
    serving.register("second", second)
    optimizer = _optimizer()
    parameter = optimizer.param_groups[0]["params"][0]
    serving.attach(optimizer)
    second.error = RuntimeError("shape of 'second' differs")
    received = _state(9, first={"value": 1}, second={"value": 1})
    with pytest.raises(RegistryError, match=r"'second'.*loaded before it: \['first'\]"):
        serving.load(received)
    assert (first.value, second.value) == (1, 0)
    refused: list[StateTornError] = []
    for refuses in (optimizer.step, lambda: serving.start_step(0), serving.snapshot):
        with pytest.raises(StateTornError, match=r"part of the state of step 9 .*shape of 'second' differs") as caught:
            refuses()
        refused.append(caught.value)
    assert len(set(map(id, refused))) == 3, "one error raised again and again would keep the frames of each time alive"
    assert parameter.detach().tolist() == [1, 1]
    assert can_read(serving)
    # What does not fit at all neither heals it nor makes it worse.
    with pytest.raises(RegistryError):
        serving.load(_state(10, first={"value": 1}))
    with pytest.raises(StateTornError, match="step 9"):
        serving.start_step(0)
    second.error = None
    serving.load(received)
    assert (second.value, serving.current_step()) == (1, 9)
    serving.start_step(9)
    optimizer.step()
    assert parameter.detach().tolist() == [0.5, 0.5]


def test_an_interrupt_during_a_load_leaves_the_state_torn(manager: Manager) -> None:
    def interrupt(_state: object) -> None:
        raise KeyboardInterrupt

    manager.register_state_dict_fn("part", interrupt, lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        manager.load(_state(3, part=1))
    with pytest.raises(StateTornError, match=r"step 3.*interrupted"):
        manager.start_step(3)
    assert can_read(manager)


# ----------------------------------------------------------------------------------------------- the rest


def test_without_a_transport_serving_and_receiving_say_what_is_missing(manager: Manager) -> None:
    with pytest.raises(ManagerError, match="checkpoint_transport to serve"):
        manager.snapshot()
    with pytest.raises(ManagerError, match="checkpoint_transport to receive"):
        manager.recover("http://127.0.0.1:1/checkpoint/")
    manager.start_step(1)
    manager.shutdown()
    manager.shutdown()


def test_a_replica_does_not_wait_for_itself(serving: Manager) -> None:
    with pytest.raises(ManagerError, match="this replica's own"):
        serving.recover(serving.metadata())


@pytest.mark.parametrize("step", ["5", -1, 2.0, None, True])
def test_a_step_that_is_no_count_is_refused(serving: Manager, step: Any) -> None:
    with pytest.raises(ManagerError, match="number of committed steps, from 0, got"):
        serving.start_step(step)
    if step is not None:
        with pytest.raises(ManagerError, match="number of committed steps, from 0, got"):
            serving.snapshot(step)
    assert serving.current_step() == 0


def test_a_snapshot_of_a_state_that_has_moved_on_does_not_get_the_old_number(serving: Manager) -> None:
    optimizer = _optimizer()
    serving.attach(optimizer)
    serving.register("counter", Counter())
    serving.snapshot().result(_LONG_S)
    optimizer.step()
    with pytest.raises(ManagerError, match="an optimizer has stepped since step 0 began; call start_step first"):
        serving.snapshot()
    serving.snapshot(1).result(_LONG_S)
    optimizer.step()
    serving.start_step(2)
    serving.snapshot().result(_LONG_S)
    assert serving.current_step() == 2


def test_a_state_function_may_step_its_optimizer_to_make_its_states(serving: Manager) -> None:
    """As DCP's does at its first call; not inside a read section, whose end that step would wait for."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    serving.register_state_dict_fn("optimizer", lambda _state: None, lambda: get_optimizer_state_dict(model, optimizer))
    serving.attach(optimizer)
    receiver: HTTPTransport[Any] = HTTPTransport()
    states: list[Any] = []
    asking = threading.Thread(target=lambda: states.append(receiver.fetch(serving.metadata()).state))
    asking.start()
    deadline_s = time.monotonic() + _LONG_S
    while asking.is_alive() and time.monotonic() < deadline_s:
        serving.start_step(0)
    asking.join(_LONG_S)
    receiver.shutdown()
    assert states[0]["user"]["optimizer"]["state"].keys() == {"weight", "bias"}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_transport_has_one_manager(serving: Manager, transport: HTTPTransport[Any]) -> None:
    with pytest.raises(TransportError, match="another owner"):
        Manager(checkpoint_transport=transport)
    with pytest.raises(TypeError, match="expected an HTTPTransport of ft_transport, got str"):
        Manager(checkpoint_transport="http://127.0.0.1:1/")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"address that a peer's metadata\(\) returned, got None"):
        serving.recover(None)  # type: ignore[arg-type]
    with pytest.raises(ManagerError, match="number of committed steps, from 0, got str 'x'"):
        serving.recover("http://127.0.0.1:1/", "x")  # type: ignore[arg-type]


def test_shutdown_twice_and_what_comes_after_it(serving: Manager) -> None:
    optimizer = _optimizer()
    serving.attach(optimizer)
    serving.register("counter", Counter())
    future = serving.snapshot()
    serving.shutdown()
    assert future.done()
    serving.shutdown(wait=False)
    with pytest.raises(ManagerError, match="shut down"):
        serving.snapshot()
    serving.start_step(1)
    optimizer.step()


def test_many_attachments_one_after_the_other_are_not_kept(manager: Manager) -> None:
    optimizer = _optimizer()
    earlier: list[weakref.ref[OptimizerAttachment]] = []
    for _ in range(3):
        with manager.attach(optimizer) as attachment:
            optimizer.step()
        earlier.append(weakref.ref(attachment))
        del attachment
    last = manager.attach(optimizer)
    gc.collect()
    assert [attachment() for attachment in earlier] == [None] * 3
    assert last.optimizers == (optimizer,)
