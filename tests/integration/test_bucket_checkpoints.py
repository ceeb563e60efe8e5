"""Checkpoints in a bucket of a real S3 server (moto), behind a proxy that injects faults."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import bucket_ranks
import buckets
import pytest
import torch
from buckets import BUCKET, LOST, REFUSALS, Bucket, used_bucket
from ranks import run_ranks
from state_equality import exact

from ft_transport import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointStore,
    CheckpointUntrustedError,
    ConfigurationError,
    RankFailedError,
    StoreSettings,
)
from ft_transport.checkpoint import bucket_files, bucket_index, bucket_root

_SETTINGS = StoreSettings(timeout=timedelta(seconds=30))
_URL = f"s3://{BUCKET}/run"
_NUM_ELEMENTS = 30_000


@pytest.fixture
def bucket(obstore_ready: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with used_bucket(monkeypatch) as served:
        yield served


@pytest.fixture
def store(bucket: Bucket) -> Iterator[CheckpointStore]:
    with CheckpointStore(_URL, settings=_SETTINGS) as made:
        yield made


def state_of(seed: int = 0, *, num_tensors: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = {f"layer {at}": torch.randn(_NUM_ELEMENTS, generator=generator) for at in range(num_tensors)}
    return {"model": model, "step": seed, "random": torch.randn(100, generator=generator)}


def data_bytes(bucket: Bucket) -> int:
    """Bytes of data files that were sent to the server since the last call."""
    total = sum(num for path, num in bucket.put_bytes.items() if ".distcp." in path)
    bucket.put_bytes.clear()
    return total


def test_a_checkpoint_is_loaded_exactly_and_each_byte_is_written_once(bucket: Bucket, store: CheckpointStore) -> None:
    state = {**state_of(), "large": torch.randn(9 << 20)}
    store.save(5, state, wait=True)
    num_bytes = sum(each.nbytes for each in state["model"].values()) + (36 << 20)
    assert num_bytes < data_bytes(bucket) < num_bytes + (64 << 10)
    store.verify(5)
    assert (store.steps(), store.latest()) == ((5,), 5)
    assert exact(store.load(5).state) == exact(state)
    into = {"model": {name: torch.zeros(_NUM_ELEMENTS) for name in state["model"]}}
    store.load("latest", into=into)
    assert exact(into["model"]) == exact(state["model"])
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as reader:
        found = reader.load_newest_good()
    assert found is not None
    assert exact(found.state) == exact(state)


def test_a_checkpoint_is_replaced_only_if_the_save_says_so(store: CheckpointStore) -> None:
    store.save(5, state_of(1), wait=True)
    with pytest.raises(CheckpointExistsError, match=_URL):
        store.save(5, state_of(2), wait=True)
    assert exact(store.load(5).state) == exact(state_of(1))
    store.save(5, state_of(2), wait=True, overwrite=True)
    assert exact(store.load(5).state) == exact(state_of(2))
    with pytest.raises(CheckpointNotFoundError, match=_URL):
        store.load(6)


def test_only_the_newest_are_kept_and_no_object_of_others_is_left(bucket: Bucket) -> None:
    with CheckpointStore(_URL, settings=_SETTINGS, keep=2) as store:
        for step in range(1, 6):
            store.save(step, state_of(step), wait=True)
        store.wait()
        store.save(6, state_of(6), wait=True)
        store.prune(2)
        assert store.steps() == (5, 6)
        folders = {path.rpartition("/")[0] for path in bucket.objects(_URL)}
        assert {folder.partition("/")[0] for folder in folders} == {"", "step-5", "step-6"}
        assert store.prune(1) == (5,)
        assert exact(store.load("latest").state) == exact(state_of(6))
    with CheckpointStore(_URL, settings=_SETTINGS, existing="clear") as store:
        assert store.steps() == ()
    assert bucket.objects(_URL) == ["steps.json"]


def test_a_frozen_base_is_written_once(bucket: Bucket, store: CheckpointStore) -> None:
    state = state_of(num_tensors=20)
    for layer in range(20):
        state["model"][f"layer {layer}.adapter"] = torch.zeros(_NUM_ELEMENTS // 100)
    state = {"model": dict(sorted(state["model"].items())), "step": 0}
    written = []
    for step in range(1, 4):
        for layer in range(20):
            state["model"][f"layer {layer}.adapter"] += step
        store.save(step, state, wait=True)
        written.append(data_bytes(bucket))
    assert max(written[1:]) <= 0.03 * written[0]
    store.prune(1)
    store.verify(3)
    assert exact(store.load(3).state) == exact(state)


def test_of_20_checkpoints_all_that_remain_are_exact(bucket: Bucket) -> None:
    chosen = random.Random(0)
    state = state_of()
    saved: dict[int, dict[str, Any]] = {}
    root = bucket_root.BucketRoot(_URL, "step")
    with CheckpointStore(_URL, settings=_SETTINGS) as store:
        for step in range(1, 21):
            for name in chosen.sample(sorted(state["model"]), chosen.randint(0, 6)):
                state["model"][name] = torch.randn(_NUM_ELEMENTS)
            state["step"] = step
            store.save(step, state, wait=True)
            saved[step] = {**state, "model": dict(state["model"])}
            if len(saved) > 3:
                pruned = chosen.choice(sorted(saved))
                del saved[pruned]
                store._root.delete(store._root.retire(pruned))
        assert store.steps() == tuple(sorted(saved)) == tuple(root.numbers())
        for step, expected in saved.items():
            store.verify(step)
            assert exact(store.load(step).state) == exact(expected)


def test_verify_names_the_file_with_a_flipped_bit(bucket: Bucket, store: CheckpointStore) -> None:
    store.save(1, state_of(1), wait=True)
    store.save(2, state_of(2), wait=True)
    (path,) = (path for path in bucket.objects(_URL) if path.startswith("step-2/") and ".distcp." in path)
    client = bucket.client()
    content = bytearray(client.get_object(Bucket=BUCKET, Key=f"run/{path}")["Body"].read())
    content[1000] ^= 1
    client.put_object(Bucket=BUCKET, Key=f"run/{path}", Body=bytes(content))
    with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp") as caught:
        store.verify(2)
    assert caught.value.files == ("__0_0.distcp",)
    found = store.load_newest_good()
    assert found is not None
    assert found.step == 1
    client.delete_object(Bucket=BUCKET, Key=f"run/{path}")
    client.close()
    with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp"):
        store.load(2)


def test_a_file_that_was_deleted_behind_the_store_is_written_again(bucket: Bucket, store: CheckpointStore) -> None:
    state = state_of()
    store.save(1, state, wait=True)
    client = bucket.client()
    for path in bucket.objects(_URL):
        if ".distcp." in path:
            client.delete_object(Bucket=BUCKET, Key=f"run/{path}")
    client.close()
    store.save(2, state, wait=True)
    store.verify(2)
    assert exact(store.load(2).state) == exact(state)


def test_a_signed_checkpoint_is_loaded_with_its_token_only(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    signing = StoreSettings(timeout=timedelta(seconds=30), token="a-token-that-is-long-enough-to-be-one")
    other = StoreSettings(timeout=timedelta(seconds=30), token="another-token-that-is-long-enough-too")
    with CheckpointStore(_URL, settings=signing) as store:
        store.save(1, state_of(), wait=True)
        state = state_of()
        state["step"] = 7
        store.save(2, state, wait=True)  # shares files, which are not named in the signed list
        assert exact(store.load(2).state) == exact(state)
    with CheckpointStore(_URL, settings=other, read_only=True) as store, pytest.raises(CheckpointUntrustedError):
        store.load(2)


def test_another_group_cannot_save_to_the_same_prefix(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_index, "_BEAT_S", 0.1)
    monkeypatch.setattr("ft_transport.checkpoint.inventory._CLAIM_S", 0.0)
    store = CheckpointStore(_URL, settings=_SETTINGS)
    with pytest.raises(CheckpointInUseError, match="group of 1"):
        CheckpointStore(_URL, settings=_SETTINGS)
    store.save(1, state_of(), wait=True)
    store.close()
    CheckpointStore(_URL, settings=_SETTINGS).close()


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_bucket_that_ignores_conditions_is_refused(bucket: Bucket, condition: str) -> None:
    bucket.dropped = (condition,)
    with pytest.raises(ConfigurationError, match=condition):
        CheckpointStore(_URL, settings=_SETTINGS)
    assert bucket.objects(_URL) == []


@pytest.mark.parametrize("refusal", ["denied", "expired", "skewed"])
def test_a_bucket_that_may_only_be_read_is_read(bucket: Bucket, refusal: str) -> None:
    with CheckpointStore(_URL, settings=_SETTINGS) as store:
        store.save(1, state_of(), wait=True)
    bucket.fault = lambda method, _path: refusal if method != "GET" else None
    with pytest.raises(RankFailedError, match=f"PermissionError.*{REFUSALS[refusal][1][13:20]}"):
        CheckpointStore(_URL, settings=_SETTINGS)
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as store:
        assert exact(store.load().state) == exact(state_of())


def test_credentials_that_expire_during_a_save_fail_that_save_alone(bucket: Bucket, store: CheckpointStore) -> None:
    store.save(1, state_of(1), wait=True)
    bucket.fault = lambda _method, path: "expired" if "/step-2/" in path else None
    with pytest.raises(RankFailedError, match=r"PermissionError.*ExpiredToken"):
        store.save(2, state_of(2), wait=True)
    bucket.fault = buckets.no_fault
    assert store.steps() == (1,)
    store.save(3, state_of(3), wait=True)
    assert exact(store.load(3).state) == exact(state_of(3))
    assert not any(path.startswith("step-2/") for path in bucket.objects(_URL))


@pytest.mark.parametrize("kind", ["slow down", *LOST])
def test_a_fault_in_every_request_is_overcome(bucket: Bucket, store: CheckpointStore, kind: str) -> None:
    seen: set[tuple[str, str]] = set()

    def once(method: str, path: str) -> str | None:
        """The first request of each kind fails; its repetition does not."""
        is_new = (method, path) not in seen
        seen.add((method, path))
        return kind if is_new else None

    bucket.fault = once
    for step in (1, 2):
        store.save(step, state_of(step), wait=True)
        assert exact(store.load(step).state) == exact(state_of(step))
    store.verify(2)
    assert store.prune(1) == (1,)
    bucket.fault = buckets.no_fault
    assert {path.partition("/")[0] for path in bucket.objects(_URL)} - {"steps.json"} <= {
        "step-2", *(path for path in bucket.objects(_URL) if path.startswith(".owner-")),
    }  # fmt: skip
    assert len(seen) > 10


def test_an_unreachable_bucket_does_not_count_as_damage(
    bucket: Bucket, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, state_of(1), wait=True)
    store.save(2, state_of(2), wait=True)
    monkeypatch.setitem(bucket_files._RETRIES, "max_retries", 1)
    bucket_files.open_bucket.cache_clear()
    bucket.fault = lambda _method, path: "cut before" if "/step-2/" in path else None
    with CheckpointStore(_URL, settings=StoreSettings(timeout=timedelta(seconds=2)), read_only=True) as reader:
        with pytest.raises(RankFailedError, match="TimeoutError"):
            reader.load_newest_good()
        bucket.fault = buckets.no_fault
        found = reader.load_newest_good()
    assert found is not None
    assert found.step == 2


def test_what_only_a_directory_can_do_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="consolidate"):
        CheckpointStore(_URL, consolidate="model", settings=_SETTINGS)
    with pytest.raises(ConfigurationError, match="private"):
        CheckpointStore(_URL, settings=StoreSettings(private=True))
    with pytest.raises(ConfigurationError, match="az://"):
        CheckpointStore("ftp://host/x", settings=_SETTINGS)
    with pytest.raises(CheckpointError):
        CheckpointStore("s3://no-such-bucket/run", settings=_SETTINGS)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_four_ranks_save_and_load_in_other_layouts(bucket: Bucket, tmp_path: Path) -> None:
    run_ranks(bucket_ranks.__file__, 4, _URL, str(tmp_path), timeout_s=150)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    written = sum(num for path, num in bucket.put_bytes.items() if ".distcp." in path)
    num_bytes = reports[0]["state_bytes"]
    # The second save writes one weight of the model again.
    assert num_bytes < written < 1.3 * num_bytes
    for name in bucket_ranks.LOADED_AS:
        loads = [report["loaded"][name] for report in reports]
        assert not any(load["differences"] for load in loads), name
        assert sum(load["num_bytes_read"] for load in loads) < 1.2 * num_bytes  # by whole chunks
