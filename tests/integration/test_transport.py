"""HTTPTransport from end to end: between processes, as torchft calls it, and for those who only have curl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import safetensors.torch
import torch
from programs import run
from sharded_tools import mesh_of, part_of
from torch.distributed.tensor import Shard
from transport_settings import settings_of

from ft_transport import (
    ConfigurationError,
    DeadlineExceededError,
    FetchTimeout,
    HTTPTransport,
    PeerUnreachableError,
    SnapshotError,
    UnsupportedLeafError,
    state_digest,
)
from ft_transport.errors import RestoreError
from ft_transport.state import arena
from ft_transport.state.snapshot import Taking

WORKERS = Path(__file__).parents[1] / "workers"
TIMEOUT = timedelta(seconds=30)
MIB = 1 << 20


@contextmanager
def transport(*, read_lock: Any = None, state_dict: Any = None, **settings: Any) -> Iterator[HTTPTransport[Any]]:
    chosen: dict[str, Any] = {"host": "127.0.0.1", "lease": timedelta(0), **settings}
    made: HTTPTransport[Any] = HTTPTransport(
        TIMEOUT, read_lock=read_lock, state_dict=state_dict, settings=settings_of(**chosen)
    )
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def sender() -> Iterator[HTTPTransport[Any]]:
    with transport() as made:
        yield made


@contextmanager
def slow_reader(source: HTTPTransport[Any], step: int) -> Iterator[subprocess.Popen[bytes]]:
    """A download in a process of its own that has begun and would take minutes."""
    process = subprocess.Popen(
        ["curl", "--silent", "--limit-rate", "100k", f"{source.metadata()}{step}/full"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert len(process.stdout.read(1)) == 1
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.mark.parametrize(("num_tensors", "bytes_per_tensor"), [(32, 4 * MIB), (2048, 64 << 10)])
def test_another_process_receives_in_place_and_needs_no_memory_for_it(
    sender: HTTPTransport[Any], num_tensors: int, bytes_per_tensor: int
) -> None:
    state = {f"w{index}": torch.randn(bytes_per_tensor // 4) for index in range(num_tensors)}
    sender.send_checkpoint([1], 7, state, TIMEOUT)
    script = str(WORKERS / "fetching_process.py")
    done = run([sys.executable, script, sender.metadata(), str(num_tensors), str(bytes_per_tensor)], timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    total = num_tensors * bytes_per_tensor
    assert (report["step"], report["digest"]) == (7, state_digest(state))
    assert report["in_place"]
    assert report["extra_bytes"] <= 64 * MIB
    # The progress: never back, and to the end.
    assert report["done_bytes"] == sorted(report["done_bytes"])
    assert len(report["done_bytes"]) >= 10
    assert (report["done_bytes"][-1], report["total_bytes"]) == (total, [total])
    assert report["elapsed_ascending"]


def test_the_receivers_own_state_function_says_where_to_receive(sender: HTTPTransport[Any]) -> None:
    own = {"w": torch.zeros(1000), "n": 0}
    with transport(state_dict=lambda: own) as receiver:
        sender.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "n": 5}, TIMEOUT)
        received = receiver.recv_checkpoint(0, sender.metadata(), 1, TIMEOUT)
    assert received["w"] is own["w"]
    assert torch.equal(own["w"], torch.arange(1000.0))
    assert received["n"] == 5


def test_the_state_function_is_called_afresh_under_the_read_lock_which_opens_before_anything_is_sent() -> None:
    held: list[str] = []
    calls: list[bool] = []
    weight = torch.zeros(1000)

    @contextmanager
    def read_lock(timeout: timedelta) -> Iterator[None]:
        assert timeout == TIMEOUT
        held.append("lock")
        yield
        held.pop()

    def state() -> dict[str, torch.Tensor]:
        calls.append(bool(held))
        return {"w": weight}

    with transport(read_lock=read_lock) as sender:
        for step in (1, 2):
            sender.send_checkpoint([], step, state, TIMEOUT)
            assert held == []
            weight += 1  # What was taken does not follow.
        received = [sender.fetch(sender.metadata(), step).state["w"] for step in (1, 2)]
    assert calls == [True, True]
    assert [tensor[0].item() for tensor in received] == [0.0, 1.0]


@needs_curl
def test_disallow_returns_at_once_while_somebody_reads_slowly(sender: HTTPTransport[Any]) -> None:
    sender.send_checkpoint([1], 1, {"w": torch.zeros(16 * MIB)}, TIMEOUT)
    with slow_reader(sender, 1) as process:
        started_s = time.monotonic()
        sender.disallow_checkpoint()
        sender.allow_checkpoint(2)
        sender.disallow_checkpoint()
        assert time.monotonic() - started_s < 0.5
        # And a new snapshot does not wait for the reader either.
        sender.send_checkpoint([1], 2, {"w": torch.ones(16)}, TIMEOUT)
        assert time.monotonic() - started_s < 5
        assert process.poll() is None


@needs_curl
@pytest.mark.parametrize("wait", [True, False])
def test_shutdown_does_not_wait_for_a_slow_reader_and_may_be_called_twice(
    sender: HTTPTransport[Any], wait: bool
) -> None:
    sender.send_checkpoint([1], 1, {"w": torch.zeros(16 * MIB)}, TIMEOUT)
    with slow_reader(sender, 1):
        started_s = time.monotonic()
        sender.shutdown(wait=wait)
        sender.shutdown()
        assert time.monotonic() - started_s < 5
    with pytest.raises(SnapshotError, match="shut down"):
        sender.send_checkpoint([1], 2, {"w": torch.zeros(1)}, TIMEOUT)


def test_a_state_that_cannot_be_sent_reserves_nothing() -> None:
    with transport(max_snapshots=1) as sender:
        for step in range(3):
            with pytest.raises(UnsupportedLeafError) as caught:
                sender.send_checkpoint([1], step, {"w": torch.zeros(4), "bad": object()}, TIMEOUT)
            assert "bad" in str(caught.value)
            assert caught.value.step == step

        def failing() -> object:
            raise KeyError("the user's own")

        with pytest.raises(KeyError, match="own"):
            sender.send_checkpoint([1], 3, failing, TIMEOUT)
        sender.send_checkpoint([1], 4, {"a": 1}, TIMEOUT)
        assert sender.fetch(sender.metadata(), 4).state == {"a": 1}


def test_a_snapshot_that_is_abandoned_reserves_nothing() -> None:
    with transport(max_snapshots=1) as sender:
        for _ in range(3):
            in_progress = sender.server.take(Taking(step=1, state={"w": torch.zeros(4)}, deferrable=lambda _: True))
            in_progress.abandon()
        in_progress = sender.server.take(Taking(step=2, state={"w": torch.ones(4)}, deferrable=lambda _: True))
        assert sender.server.newest_step() is None
        in_progress.copy_deferred()
        in_progress.publish()
        assert (sender.server.newest_step(), sender.server.newest_sequence()) == (2, 1)


def test_the_first_snapshot_finds_its_memory_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    with transport(max_snapshots=2) as sender:
        state = {"w": torch.rand(1 << 20), "b": torch.rand(3, dtype=torch.float64)}
        sender.prefault(state)
        preparing = sender.server._stager._pool._preparing
        if preparing is not None:
            preparing.join(20)
        monkeypatch.setattr(arena, "Arena", None)
        for step in (1, 2, 3):
            sender.send_checkpoint([], step, state, TIMEOUT)
        received = sender.fetch(sender.metadata(), 3).state
    assert torch.equal(received["w"], state["w"])


def test_an_old_state_does_not_pass_for_the_latest(sender: HTTPTransport[Any]) -> None:
    sender.send_checkpoint([], 3, {"a": 3}, TIMEOUT)
    sender.serve_fresh(
        lambda _step: sender.server.newest_sequence()
    )  # As a trainer that has moved on and is at no step boundary.
    with pytest.raises(DeadlineExceededError, match=r"the newest one is older \(step 3\)"):
        sender.fetch(sender.metadata(), timeout=timedelta(seconds=1))
    with pytest.raises(ConfigurationError, match="another owner"):
        sender.serve_fresh(lambda _step: 0)
    sender.serve_fresh(None)
    sender.serve_fresh(lambda _step: 0)
    assert sender.fetch(sender.metadata()).step == 3


def test_an_error_at_the_deadline_gives_the_reason_of_the_peer(sender: HTTPTransport[Any]) -> None:
    with pytest.raises(DeadlineExceededError, match="none has been taken yet"):
        sender.fetch(sender.metadata(), timeout=timedelta(seconds=0.5))
    sender.send_checkpoint([], 3, {"a": 3}, TIMEOUT)
    with pytest.raises(DeadlineExceededError, match=r"expected step 4, but this replica serves \[3\]"):
        sender.fetch(sender.metadata(), 4, timeout=timedelta(seconds=0.5))


def curl(*arguments: str) -> None:
    subprocess.run(["curl", "--silent", "--show-error", "--fail", *arguments], check=True, timeout=60)


@needs_curl
def test_what_curl_saves_is_a_safetensors_file(sender: HTTPTransport[Any], tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(300, 70), "half": torch.randn(33).bfloat16(), "mask": torch.tensor([True, False])},
        "step": torch.tensor(3),
        "name": "not a tensor",
    }
    sender.send_checkpoint([1], 3, state, TIMEOUT)
    path = tmp_path / "model.safetensors"
    curl("--output", str(path), f"{sender.metadata()}3/full")
    loaded = safetensors.torch.load_file(path)

    expected = [state["model"]["w"], state["model"]["half"], state["model"]["mask"], state["step"]]  # type: ignore[index]
    assert len(loaded) == len(expected)
    for tensor in expected:
        assert sum(found.dtype == tensor.dtype and torch.equal(found, tensor) for found in loaded.values()) == 1


@needs_curl
@pytest.mark.parametrize("how", ["latest", "number"])
def test_curl_resumes_a_download(sender: HTTPTransport[Any], tmp_path: Path, how: str) -> None:
    weights = torch.randn(2 * MIB)
    sender.send_checkpoint([1], 3, {"w": weights}, TIMEOUT)
    url = f"{sender.metadata()}{'latest' if how == 'latest' else 3}/full"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    curl("--output", str(whole), url)
    resumed.write_bytes(whole.read_bytes()[:1_234_567])
    curl("--continue-at", "-", "--output", str(resumed), url)
    assert resumed.read_bytes() == whole.read_bytes()
    assert torch.equal(next(iter(safetensors.torch.load_file(resumed).values())), weights)


def test_the_advertised_address_is_checked_by_asking_there(sender: HTTPTransport[Any]) -> None:
    sender.check_address(TIMEOUT)
    # Another transport answers there.
    with transport(advertise="127.0.0.1") as other:
        port = urlsplit(sender.metadata()).port
        other.server.http.address = f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigurationError, match="got another server"):
            other.check_address(TIMEOUT)
    # Bound to one address, told another.
    with (
        transport(host="127.0.0.1", advertise="127.0.0.2") as unreachable,
        pytest.raises(ConfigurationError, match=r"127\.0\.0\.2:\d+.*FT_TRANSPORT_ADVERTISE"),
    ):
        unreachable.check_address(TIMEOUT)


def test_a_peer_that_is_out_of_reach_is_given_up_before_the_deadline(sender: HTTPTransport[Any]) -> None:
    with transport() as gone:
        address = gone.metadata()
    started_s = time.monotonic()
    with pytest.raises(PeerUnreachableError):
        sender.fetch(address, 3, timeout=FetchTimeout(total=TIMEOUT, unreachable=timedelta(seconds=0.3)))
    assert time.monotonic() - started_s < TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("received", [torch.ones(3), torch.ones(3, 4).t()], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_stays_as_it_is(
    sender: HTTPTransport[Any],
    caplog: pytest.LogCaptureFixture,
    layout: torch.layout,
    received: torch.Tensor,
    is_sharded: bool,
) -> None:
    sender.send_checkpoint([], 3, {"a": received}, TIMEOUT)
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)
    with transport() as receiver:
        into = {"a": nested}
        if is_sharded:
            state = receiver.fetch_sharded([sender.metadata()], 3, into=into).state
        else:
            state = receiver.fetch(sender.metadata(), 3, into=into).state
    assert torch.equal(state["a"], received)
    assert all(not part.any() for part in nested.unbind())
    assert any("a is a nested tensor here and float32" in record.getMessage() for record in caplog.records)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_no_place_for_a_part_of_a_dtensor(
    sender: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test of this process may have made a group, out of which a mesh could be built.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    part = part_of(torch.ones(4, 3), mesh_of((1,), 0, "x"), [Shard(0)])
    sender.send_checkpoint([], 3, {"a": part}, TIMEOUT)
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.strided)
    with transport() as receiver, pytest.raises(RestoreError, match="expected a device mesh") as caught:
        receiver.fetch(sender.metadata(), 3, into={"a": nested})
    assert caught.value.path == "a"


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tensors_that_do_not_fit_are_named_once(
    sender: HTTPTransport[Any], caplog: pytest.LogCaptureFixture, is_sharded: bool
) -> None:
    sender.send_checkpoint([], 3, {"head": torch.ones(4), "body": torch.ones(2, 2), "same": torch.ones(1)}, TIMEOUT)
    into = {"head": torch.zeros(5), "body": torch.zeros(2, 2, dtype=torch.float64), "same": torch.zeros(1)}
    with transport() as receiver:

        def fetch() -> Any:
            if is_sharded:
                return receiver.fetch_sharded([sender.metadata()], 3, into=into).state
            return receiver.fetch(sender.metadata(), 3, into=into).state

        state = fetch()
        fetch()
        assert state["same"] is into["same"]
        assert torch.equal(state["head"], torch.ones(4))
        assert torch.equal(into["head"], torch.zeros(5))
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "step 3" in warning
        assert urlsplit(sender.metadata()).netloc in warning
        assert "2 of the receiver's tensors stayed unchanged" in warning
        assert "head is float32[5] here and float32[4] there" in warning
        assert "body is float64[2, 2] here and float32[2, 2] there" in warning
        into["same"] = torch.zeros(2)
        fetch()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "1 of the receiver's tensors stayed unchanged" in warnings[-1]
    assert "same is float32[2] here and float32[1] there" in warnings[-1]
    assert len(warnings) == 2
