"""Checkpoints of a directory that a process of its own copies to a bucket, and loads that take the newest of both."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import buckets
import pytest
import torch
import torch.distributed.checkpoint as dcp
from buckets import BUCKET, Bucket, used_bucket
from programs import run
from served_memory import until
from state_equality import exact
from torch import nn

from ft_transport import CheckpointExistsError, CheckpointStore, ConfigurationError, StoreSettings, Upload
from ft_transport.checkpoint import bucket_index
from ft_transport.checkpoint.settings import Existing
from manager import StateManager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_SETTINGS = StoreSettings(timeout=timedelta(seconds=30))
_URL = f"s3://{BUCKET}/run"


@pytest.fixture
def bucket(obstore_ready: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with used_bucket(monkeypatch) as served:
        yield served


def state_of(step: int) -> dict[str, Any]:
    frozen = torch.arange(100_000, dtype=torch.float32)
    return {"model": {"frozen": frozen, "trained": torch.full((5000,), float(step))}, "step": step}


def _flip(path: Path) -> None:
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_every_checkpoint_that_is_due_is_uploaded_with_its_new_bytes_alone(bucket: Bucket, tmp_path: Path) -> None:
    written = []
    for step in range(1, 4):
        # Closing waits for the upload, so that none is overtaken by the next.
        with CheckpointStore(tmp_path, keep=2, upload=Upload(_URL, every=2, keep=1), settings=_SETTINGS) as store:
            store.save(step, state_of(step), wait=True)
        written.append(sum(num for path, num in bucket.put_bytes.items() if ".distcp." in path))
        bucket.put_bytes.clear()
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as uploaded:
        assert uploaded.steps() == (3,)
        for step in uploaded.steps():
            uploaded.verify(step)
            assert exact(uploaded.load(step).state) == exact(state_of(step))
    assert written[1] == 0
    assert written[0] > 400_000


def test_a_load_takes_the_newest_good_one_of_both(bucket: Bucket, tmp_path: Path) -> None:
    def store() -> CheckpointStore:
        return CheckpointStore(tmp_path, upload=Upload(_URL), settings=_SETTINGS)

    for step in (1, 2):
        with store() as saving:
            saving.save(step, state_of(step), wait=True)
    _flip(tmp_path / "step-2" / "__0_0.distcp")
    with store() as loading:
        found = loading.load_newest_good()
        assert found is not None
        assert exact(found.state) == exact(state_of(2)), "the damaged one's copy in the bucket is good"
    shutil.rmtree(tmp_path)
    with store() as loading:
        assert loading.steps() == ()
        found = loading.load_newest_good()
        assert found is not None
        assert exact(found.state) == exact(state_of(2))
        assert exact(loading.load(1).state) == exact(state_of(1))
        loading.save(3, state_of(3), wait=True)
        found = loading.load_newest_good()
        assert found is not None
        assert found.step == 3


def test_a_failed_upload_is_reported_and_the_next_one_succeeds(bucket: Bucket, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, upload=Upload(_URL), settings=_SETTINGS) as store:
        store.save(1, state_of(1), wait=True)
        _await_uploads(store)
        store.check_health()
        bucket.fault = lambda method, path: "denied" if method == "PUT" and "/step-2/" in path else None
        store.save(2, state_of(2), wait=True)
        _await_uploads(store)
        store.check_health()
        assert store.check_health().num_failed_uploads == 1
        bucket.fault = buckets.no_fault
        store.save(3, state_of(3), wait=True)
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as uploaded:
        assert uploaded.steps() == (1, 3)


def _await_uploads(store: CheckpointStore) -> None:
    uploader = store._background._retention._uploader
    assert uploader is not None
    until(lambda: not uploader.pending())


def test_an_upload_outlives_the_trainer(bucket: Bucket, tmp_path: Path) -> None:
    program = f"""
import os, torch
from ft_transport import CheckpointStore, Upload
if __name__ == "__main__":
    store = CheckpointStore({str(tmp_path)!r}, upload=Upload({_URL!r}))
    store.save(5, {{"w": torch.full((4_000_000,), 5.0)}}, wait=True)
    print("saved", flush=True)
    os.kill(os.getpid(), 9)
"""
    ended = run([sys.executable, "-c", program], timeout=60)
    assert (ended.returncode, ended.stdout) == (-9, "saved\n"), ended.stderr
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as uploaded:
        until(lambda: uploaded.steps() == (5,))
        assert exact(uploaded.load(5).state) == exact({"w": torch.full((4_000_000,), 5.0)})


def test_a_manager_resumes_from_the_bucket_if_the_directory_is_lost(bucket: Bucket, tmp_path: Path) -> None:
    def train(root: Path, num_steps: int) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        store = CheckpointStore(root, upload=Upload(_URL), settings=_SETTINGS)
        manager = StateManager(checkpoint_store=store, save_every=2)
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        with manager.attach(optimizer):
            manager.resume()
            begun = manager.current_step()
            for step in range(begun, num_steps):
                manager.start_step(step)
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        manager.shutdown()
        return begun, {name: each.clone() for name, each in model.state_dict().items()}

    train(tmp_path / "first host", 5)
    begun, resumed = train(tmp_path / "second host", 8)
    assert begun == 4
    _, uninterrupted = train(tmp_path / "third host", 8)  # resumes too, from step 6
    assert exact(resumed) == exact(uninterrupted)


def test_dcp_reads_what_was_copied_from_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    state = state_of(1)
    with CheckpointStore(_URL, settings=_SETTINGS) as store:
        store.save(1, state, wait=True)
        state["model"]["trained"] += 1
        store.save(2, state, wait=True)
    command = [sys.executable, "-m", "ft_transport.cli", "copy", f"{_URL}/step-2", str(tmp_path)]
    copied = run(command, timeout=60)
    assert copied.returncode == 0, copied.stderr
    assert "step-2" in copied.stdout
    loaded = {"model": {name: torch.zeros_like(each) for name, each in state["model"].items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert exact(loaded["model"]) == exact(state["model"])


def _command(*arguments: str) -> Any:
    return run([sys.executable, "-m", "ft_transport.cli", *arguments], timeout=60, stderr=subprocess.STDOUT)


def test_commands_take_the_url_of_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    with CheckpointStore(_URL, settings=_SETTINGS) as store:
        store.save(1, state_of(1), wait=True)
        store.save(2, state_of(2), wait=True)
    shown = _command("inspect", _URL)
    assert shown.returncode == 0, shown.stdout
    assert "model.trained" in shown.stdout
    assert "step 2" in shown.stdout
    checked = _command("verify", f"{_URL}/step-1")
    assert checked.returncode == 0, checked.stdout
    assert "2 tensors" in checked.stdout
    differing = _command("diff", f"{_URL}/step-1", f"{_URL}/step-2")
    assert differing.returncode == 1, differing.stdout
    assert "model.trained" in differing.stdout
    copied = _command("copy", _URL, str(tmp_path))
    assert copied.returncode == 0, copied.stdout
    assert _command("diff", _URL, str(tmp_path)).returncode == 0
    assert _command("copy", str(tmp_path), f"s3://{BUCKET}/other").returncode == 0
    assert _command("verify", f"s3://{BUCKET}/other").returncode == 0
    missing = _command("verify", f"{_URL}/step-3")
    assert missing.returncode == 2, missing.stdout
    client = bucket.client()
    (path,) = (path for path in bucket.objects(_URL) if path.startswith("step-1/") and ".distcp.0" in path)
    client.put_object(Bucket=BUCKET, Key=f"run/{path}", Body=b"x")
    client.close()
    damaged = _command("verify", f"{_URL}/step-1")
    assert damaged.returncode == 1
    assert "__0_0.distcp" in damaged.stdout


def test_wrong_settings_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    for make in (lambda: Upload("not a url"), lambda: Upload(_URL, every=0), lambda: Upload(_URL, keep=0)):
        with pytest.raises(ConfigurationError):
            make()
    with pytest.raises(ConfigurationError, match="upload"):
        CheckpointStore(_URL, upload=Upload(f"s3://{BUCKET}/copies"), settings=_SETTINGS)


def test_a_step_that_is_saved_again_is_uploaded_again(bucket: Bucket, tmp_path: Path) -> None:
    for value in (1, 2):
        with CheckpointStore(tmp_path, upload=Upload(_URL, keep=1), settings=_SETTINGS) as store:
            store.save(100, state_of(value), wait=True, overwrite=True)
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as uploaded:
        assert uploaded.steps() == (100,)
        assert exact(uploaded.load(100).state) == exact(state_of(2))


def test_an_object_that_was_changed_is_not_shared_with_the_next_upload(bucket: Bucket, tmp_path: Path) -> None:
    client = bucket.client()
    with CheckpointStore(tmp_path, upload=Upload(_URL), settings=_SETTINGS) as store:
        for step in (1, 2, 3):
            store.save(step, state_of(step), wait=True)
            _await_uploads(store)
            for path in bucket.objects(_URL):
                if ".distcp." in path:
                    client.put_object(Bucket=BUCKET, Key=f"run/{path}", Body=b"damaged")
        store.save(4, state_of(4), wait=True)
    client.close()
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as uploaded:
        uploaded.verify(4)


def test_while_another_run_owns_the_bucket_uploads_fail_and_old_checkpoints_are_deleted(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_index, "_BEAT_S", 0.1)
    with CheckpointStore(tmp_path, keep=2, upload=Upload(_URL), settings=_SETTINGS) as store:
        with CheckpointStore(_URL, settings=_SETTINGS):
            for step in range(1, 5):
                store.save(step, state_of(step), wait=True)
            _await_uploads(store)
            store.save(5, state_of(5), wait=True)
            store.check_health()
            health = store.check_health()
            assert health.num_failed_uploads >= 1
            assert not health.is_good
            assert len(store.steps()) <= 4
            _await_uploads(store)
        store.save(6, state_of(6), wait=True)
    with CheckpointStore(_URL, settings=_SETTINGS, read_only=True) as uploaded:
        assert uploaded.latest() == 6


def test_the_directory_is_enough_while_the_bucket_is_unreachable(bucket: Bucket, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, upload=Upload(_URL), settings=_SETTINGS) as store:
        for step in (1, 2, 3):
            store.save(step, state_of(step), wait=True)
        _await_uploads(store)
        bucket.fault = lambda _method, _path: "denied"
        store.verify(3)
        assert exact(store.load(2).state) == exact(state_of(2))
        found = store.load_newest_good()
        assert found is not None
        assert found.step == 3
        assert store.prune(1) == (1, 2)
        bucket.fault = buckets.no_fault


@pytest.mark.parametrize("existing", ["clear", "refuse"])
def test_a_run_that_begins_anew_does_not_take_uploads_of_another_one(
    bucket: Bucket, tmp_path: Path, existing: Existing
) -> None:
    with CheckpointStore(tmp_path / "first", upload=Upload(_URL), settings=_SETTINGS) as store:
        store.save(5000, state_of(1), wait=True)
    with pytest.raises(CheckpointExistsError, match="5000"):
        CheckpointStore(tmp_path / "second", upload=Upload(_URL), existing=existing, settings=_SETTINGS)


def test_a_forked_worker_does_not_delay_the_end(bucket: Bucket, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, upload=Upload(_URL), settings=_SETTINGS)
    store.save(1, state_of(1), wait=True)
    started = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    started.start()
    begun_s = time.monotonic()
    store.close()
    took_s = time.monotonic() - begun_s
    started.terminate()
    started.join()
    started.close()
    assert took_s < 30


def test_a_copy_replaces_a_damaged_one_and_refuses_a_checkpoint_as_its_target(bucket: Bucket, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, settings=_SETTINGS) as store:
        store.save(1, state_of(1), wait=True)
    assert _command("copy", str(tmp_path), _URL).returncode == 0
    client = bucket.client()
    (path,) = (path for path in bucket.objects(_URL) if ".distcp." in path)
    client.put_object(Bucket=BUCKET, Key=f"run/{path}", Body=b"damaged")
    client.close()
    assert _command("verify", _URL).returncode == 1
    assert _command("copy", str(tmp_path), _URL).returncode == 0
    assert _command("verify", _URL).returncode == 0
    refused = _command("copy", _URL, str(tmp_path / "step-1"))
    assert refused.returncode == 2
    assert "as TARGET" in refused.stdout
