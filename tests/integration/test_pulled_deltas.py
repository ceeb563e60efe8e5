"""Engines that pull get the few elements that changed, and never anything but the version, whatever a delta says."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import issue
from few_threads import OnFewThreads
from publishers import pulling
from trained_weights import Weights, first_weights, num_bytes, same_bits, stepped

from ft_transport import (
    HTTPTransport,
    Publisher,
    PublishError,
    PullingEngine,
    TransportSettings,
    WeightReceiver,
)
from ft_transport.errors import SnapshotLimitError
from ft_transport.publish import deltas
from ft_transport.publish.deltas import delta_between
from ft_transport.state.restore import Restore
from ft_transport.wire.delta import Bytes, TensorChanges

SOON = timedelta(seconds=30)
LOOPBACK = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")


@pytest.fixture
def transport() -> Iterator[HTTPTransport[Any]]:
    transport: HTTPTransport[Any] = HTTPTransport(settings=LOOPBACK)
    yield transport
    transport.shutdown()


def zeros() -> Weights:
    return {name: torch.zeros_like(tensor) for name, tensor in first_weights().items()}


def tell(receiver: WeightReceiver, version: int, transport: HTTPTransport[Any]) -> int:
    """As a publisher does; the status of the answer."""
    body = json.dumps({"address": transport.metadata()}).encode()
    request = urllib.request.Request(f"{receiver.url}/weights/{version}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@contextmanager
def receiving(
    transport: HTTPTransport[Any], *, paused: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[tuple[WeightReceiver, Weights, Weights]]:
    """A receiver that has version 1, its tensors, and what version 1 is."""
    own, first = zeros(), first_weights()
    with WeightReceiver(own, host="127.0.0.1", paused=paused, timeout=timedelta(seconds=2)) as receiver:
        transport.send_checkpoint([], 1, {"weights": first}, SOON)
        assert tell(receiver, 1, transport) == 200
        yield receiver, own, first


def made_delta(version: int, weights: Weights, before: Weights, base: int | None = None) -> bytes:
    """By default from the version before."""
    delta = delta_between(version, weights, version - 1 if base is None else base, before)
    assert delta is not None
    return delta


def serve_second(transport: HTTPTransport[Any], first: Weights) -> tuple[Weights, bytes]:
    """Serves version 2; returns it, and the delta to it."""
    second = stepped(first, 2)
    delta = made_delta(2, second, first)
    transport.keep_delta(1, delta)
    transport.send_checkpoint([], 2, {"weights": second}, SOON)
    return second, delta


def test_a_step_that_changes_one_percent_costs_two_percent_of_the_bytes(
    tmp_path: Path, transport: HTTPTransport[Any]
) -> None:
    own, weights = zeros(), first_weights()
    with pulling(tmp_path, transport, own) as (publisher, receiver):
        publisher.publish(1, weights).result(SOON)
        assert receiver.num_bytes_fetched >= num_bytes(weights)
        for version in range(2, 6):
            weights = stepped(weights, version)
            publisher.publish(version, weights).result(SOON)
            assert receiver.version == version
            assert same_bits(own, weights)
            assert receiver.num_bytes_fetched < 0.02 * num_bytes(weights)


def test_a_trainer_that_came_back_makes_the_delta_from_what_is_on_disk(
    tmp_path: Path, transport: HTTPTransport[Any]
) -> None:
    own, weights = zeros(), first_weights()
    with WeightReceiver(own, host="127.0.0.1") as receiver:
        for version in (1, 2):
            weights = stepped(weights, version)
            with Publisher([PullingEngine(receiver.url)], tmp_path, transport=transport) as publisher:
                publisher.publish(version, weights).result(SOON)
        assert same_bits(own, weights)
        assert receiver.num_bytes_fetched < 0.02 * num_bytes(weights)


def test_a_version_before_that_was_damaged_costs_the_delta_alone(tmp_path: Path, transport: HTTPTransport[Any]) -> None:
    own, weights = zeros(), first_weights()
    with pulling(tmp_path, transport, own) as (publisher, _receiver):
        file = publisher.publish(1, weights).directory / "model.safetensors"
        file.unlink()
        file.write_bytes(bytes(100))
        weights = stepped(weights, 2)
        publisher.publish(2, weights).result(SOON)
        assert same_bits(own, weights)


def test_versions_that_wait_to_be_served_hold_no_other_engine_up(
    tmp_path: Path, transport: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SnapshotLimitError("expected room for one more snapshot")

    monkeypatch.setattr(transport, "send_checkpoint", full)
    engines = [OnFewThreads(), PullingEngine("http://127.0.0.1:9")]
    soon = timedelta(seconds=0.2)
    with Publisher(engines, tmp_path, transport=transport, engine_timeout=soon) as publisher:
        for version in range(5):
            report = publisher.publish(version, {"x": torch.zeros(3)}).report(timedelta(seconds=10))
            assert [each.outcome for each in report.engines] == ["confirmed", "late"]
        monkeypatch.undo()


def test_a_receiver_that_missed_versions_gets_all_their_deltas(transport: HTTPTransport[Any]) -> None:
    with receiving(transport) as (receiver, own, first):
        weights = first
        for version in (2, 3, 4):
            before, weights = weights, stepped(weights, version)
            transport.keep_delta(version - 1, made_delta(version, weights, before))
        transport.send_checkpoint([], 4, {"weights": weights}, SOON)
        assert tell(receiver, 4, transport) == 200
        assert receiver.num_bytes_fetched < 0.06 * num_bytes(weights)
        assert same_bits(own, weights)


def test_weights_that_are_not_the_base_become_the_version_all_the_same(transport: HTTPTransport[Any]) -> None:
    with receiving(transport) as (receiver, own, first):
        second, delta = serve_second(transport, first)
        own["layers.7.weight"].view(torch.int16)[5, 5] ^= 1
        assert tell(receiver, 2, transport) == 200
        assert same_bits(own, second)
        assert len(delta) < receiver.num_bytes_fetched <= len(delta) + (4 << 20)


@pytest.mark.parametrize("kind", ["damaged", "another's", "of other weights", "none"])
def test_a_delta_that_is_no_use_costs_bytes_and_nothing_else(transport: HTTPTransport[Any], kind: str) -> None:
    with receiving(transport) as (receiver, own, first):
        second = stepped(first, 2)
        right = made_delta(2, second, first)
        middle = len(right) // 2
        smaller = {name: tensor[:4] for name, tensor in first.items()}
        kept = {
            "damaged": right[:middle] + bytes([right[middle] ^ 1]) + right[middle + 1 :],
            "another's": made_delta(3, stepped(first, 3), first, 1),
            "of other weights": made_delta(2, stepped(smaller, 2), smaller),
        }
        if kind in kept:
            transport.keep_delta(1, kept[kind])
        transport.send_checkpoint([], 2, {"weights": second}, SOON)
        assert tell(receiver, 2, transport) == 200
        assert receiver.num_bytes_fetched >= num_bytes(second)
        assert same_bits(own, second)


def test_a_source_that_is_gone_after_the_delta_leaves_the_version_before_bit_by_bit(
    transport: HTTPTransport[Any],
) -> None:
    is_ending = False

    @contextmanager
    def paused() -> Iterator[None]:
        if is_ending:
            transport.shutdown()
        yield

    with receiving(transport, paused=paused) as (receiver, own, first):
        serve_second(transport, first)
        is_ending = True
        assert tell(receiver, 2, transport) == 500
        assert receiver.version == 1
        assert same_bits(own, first)


def test_bytes_that_landed_before_an_error_of_the_device_leave_no_version(
    transport: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving(transport) as (receiver, own, first):
        second = stepped(first, 2)
        transport.send_checkpoint([], 2, {"weights": second}, SOON)

        def failing(_: Restore) -> object:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patched:
            patched.setattr(Restore, "finish", failing)
            assert tell(receiver, 2, transport) == 500
        assert receiver.version is None
        assert all(tensor.isnan().all() for tensor in own.values())
        assert tell(receiver, 2, transport) == 200
        assert same_bits(own, second)


def test_a_delta_that_cannot_be_undone_leaves_no_version(
    transport: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving(transport) as (receiver, own, first):
        second, _ = serve_second(transport, first)
        num_applied = 0
        apply = deltas.apply_changes

        def failing(changes: TensorChanges, target: Bytes) -> None:
            nonlocal num_applied
            num_applied += 1
            if num_applied > 5:
                raise MemoryError("the device is full")
            apply(changes, target)

        with monkeypatch.context() as patched:
            patched.setattr(deltas, "apply_changes", failing)
            assert tell(receiver, 2, transport) == 500
        assert not same_bits(own, first)
        assert receiver.version is None
        assert tell(receiver, 2, transport) == 200
        assert same_bits(own, second)


def test_a_version_of_another_run_under_the_same_number_is_received(transport: HTTPTransport[Any]) -> None:
    with receiving(transport) as (receiver, own, first):
        other = stepped(first, 7)
        transport.send_checkpoint([], 1, {"weights": other}, SOON)
        assert tell(receiver, 1, transport) == 200
        assert receiver.version == 1
        assert same_bits(own, other)


def test_a_tie_is_changed_once(tmp_path: Path, transport: HTTPTransport[Any]) -> None:
    weights = first_weights()
    weights["head"] = weights["layers.0.weight"]
    own = zeros()
    own["head"] = own["layers.0.weight"]
    with pulling(tmp_path, transport, own) as (publisher, receiver):
        publisher.publish(1, weights).result(SOON)
        after = stepped(weights, 2)
        after["head"] = after["layers.0.weight"]
        publisher.publish(2, after).result(SOON)
        assert same_bits(own, after)
        # The file has the tie twice, and what has no tensor of its own here is fetched.
        assert receiver.num_bytes_fetched < 0.02 * num_bytes(after) + (4 << 20)


def test_other_weights_than_before_are_refused_with_what_differs(
    tmp_path: Path, transport: HTTPTransport[Any], caplog: pytest.LogCaptureFixture
) -> None:
    own, weights = zeros(), first_weights()
    with pulling(tmp_path, transport, own) as (publisher, receiver):
        publisher.publish(1, weights).result(SOON)
        others = {**weights, "layers.0.weight": torch.zeros(7, dtype=torch.bfloat16)}
        del others["layers.1.weight"]
        handle = publisher.publish(2, others, missing_ok=True)
        with pytest.raises(PublishError, match=r"the engine's weights .*\(weights_differ; it has version 1\)"):
            handle.result(SOON)
        assert re.search(
            r"missing: \['layers\.1\.weight'\].*layers\.0\.weight: .*\[128, 256\] in the engine, .*\[7\] published",
            caplog.text,
        )
        (engine,) = handle.report(SOON).engines
        # A pull that breaks off may leave no weights to use; which it was, the engine alone knows.
        assert (engine.outcome, engine.version) == ("refused", None)
        assert receiver.version == 1
        assert same_bits(own, weights)


def test_a_receiver_of_a_job_with_certificates_fetches_over_tls(tmp_path: Path) -> None:
    issued = issue(tmp_path / "peer")
    weights, own = {"layer": torch.arange(1000.0)}, {"layer": torch.zeros(1000)}
    source: HTTPTransport[Any] = HTTPTransport(SOON, settings=TransportSettings(host="127.0.0.1", tls=issued.files))
    try:
        source.send_checkpoint([], 1, {"weights": weights}, SOON)
        with WeightReceiver(own, host="127.0.0.1", tls=issued.files) as receiver:
            assert tell(receiver, 1, source) == 200
    finally:
        source.shutdown()
    assert torch.equal(own["layer"], weights["layer"])
