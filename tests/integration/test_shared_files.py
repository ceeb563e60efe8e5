"""Checkpoints that share the data files of unchanged tensors: each costs little, and is exact without the others."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forged_checkpoints import forge_json, forge_manifest
from state_equality import exact

from ft_transport import CheckpointDamagedError, CheckpointError, CheckpointStore, StoreSettings, TransportError
from ft_transport.checkpoint.directory import NumberedDirectory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_SETTINGS = StoreSettings(timeout=timedelta(seconds=30))
_NUM_ELEMENTS = 20_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "root", rank_local=("random",), settings=_SETTINGS) as made:
        yield made


def state_of(num_tensors: int = 10, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = {f"layer {at}": torch.randn(_NUM_ELEMENTS, generator=generator) for at in range(num_tensors)}
    return {"model": model, "step": seed, "random": torch.randn(100, generator=generator)}


def data_files(directory: Path) -> dict[int, int]:
    """Inode and size of each data file."""
    files = [path.stat() for path in directory.glob("*.distcp")]
    return {status.st_ino: status.st_size for status in files}


def num_new_bytes(root: Path, step: int) -> int:
    """Bytes of the data files of a checkpoint that the checkpoint before does not have."""
    before = data_files(root / f"step-{step - 1}")
    return sum(size for inode, size in data_files(root / f"step-{step}").items() if inode not in before)


def check_loads(store: CheckpointStore, step: int, state: dict[str, Any]) -> None:
    store.verify(step)
    assert exact(store.load(step).state) == exact(state)
    loaded = {"model": {name: torch.zeros(_NUM_ELEMENTS) for name in state["model"]}}
    dcp.load(loaded, checkpoint_id=Path(store.root) / f"step-{step}", no_dist=True)
    assert exact(loaded["model"]) == exact(state["model"])


def test_a_frozen_base_is_written_once(store: CheckpointStore) -> None:
    state = state_of(num_tensors=20)
    for layer in range(20):  # between the frozen tensors, as an adapter's
        state["model"][f"layer {layer}.adapter"] = torch.zeros(_NUM_ELEMENTS // 100)
    state = {"model": dict(sorted(state["model"].items())), "step": 0}
    for step in range(1, 4):
        for layer in range(20):
            state["model"][f"layer {layer}.adapter"] += step
        store.save(step, state, wait=True)
    num_bytes = sum(data_files(Path(store.root) / "step-1").values())
    assert num_new_bytes(Path(store.root), 2) <= 0.03 * num_bytes
    assert num_new_bytes(Path(store.root), 3) <= 0.03 * num_bytes
    # The files of the adapter at step 2 are no part of step 3.
    assert sum(data_files(Path(store.root) / "step-3").values()) <= 1.03 * num_bytes
    shutil.rmtree(Path(store.root) / "step-1")
    shutil.rmtree(Path(store.root) / "step-2")
    assert exact(store.load(3).state) == exact(state)


def test_a_state_that_changes_everywhere_shares_nothing(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, state_of(seed=step), wait=True)
    assert not data_files(Path(store.root) / "step-1").keys() & data_files(Path(store.root) / "step-2").keys()
    check_loads(store, 1, state_of(seed=1))
    check_loads(store, 2, state_of(seed=2))


@pytest.mark.parametrize("seed", range(3))
def test_of_20_checkpoints_all_that_remain_are_exact_and_none_takes_twice_its_state(
    store: CheckpointStore, seed: int
) -> None:
    chosen = random.Random(seed)
    state = state_of()
    saved: dict[int, dict[str, Any]] = {}
    num_state_bytes = 0
    for step in range(1, 21):
        for name in chosen.sample(sorted(state["model"]), chosen.randint(0, 6)):
            state["model"][name] = torch.randn(_NUM_ELEMENTS)
        state["step"] = step
        if chosen.random() < 0.3:
            state["random"] = torch.randn(100)
        store.save(step, state, wait=True)
        saved[step] = {**state, "model": dict(state["model"])}
        files = data_files(Path(store.root) / f"step-{step}")
        num_state_bytes = num_state_bytes or sum(files.values())
        assert sum(files.values()) <= 2 * num_state_bytes
        if len(saved) > 3:
            pruned = chosen.choice(sorted(saved))
            del saved[pruned]
            shutil.rmtree(Path(store.root) / f"step-{pruned}")
    assert store.steps() == tuple(sorted(saved))
    for step, expected in saved.items():
        check_loads(store, step, expected)


@pytest.mark.parametrize("changed", [0, 3000, _NUM_ELEMENTS // 2, 15_000, _NUM_ELEMENTS - 1])
def test_one_changed_number_is_written_wherever_it_is(store: CheckpointStore, changed: int) -> None:
    state = state_of(num_tensors=2)
    for step, position in ((1, 0), (2, 0), (3, changed), (4, changed)):
        state["model"]["layer 1"][position] += 1
        store.save(step, state, wait=True)
        check_loads(store, step, state)


def _overwrite(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(b"x" * path.stat().st_size)


def _replace(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(b"y" * len(content))


@pytest.mark.parametrize("harm", [_overwrite, _replace, Path.unlink, lambda path: shutil.rmtree(path.parent)])
def test_files_that_another_program_has_changed_are_not_shared(
    store: CheckpointStore, harm: Callable[[Path], None]
) -> None:
    store.save(1, state_of(), wait=True)
    harm(Path(store.root) / "step-1" / "__0_0.distcp")
    store.save(2, state_of(), wait=True)
    check_loads(store, 2, state_of())


def test_a_shared_file_is_not_writable(store: CheckpointStore) -> None:
    """A program that overwrites the files of one checkpoint, as `dcp.save` does, would change the others."""
    for step in (1, 2):
        store.save(step, state_of(), wait=True)
    assert (Path(store.root) / "step-1" / "__0_0.distcp").stat().st_mode & 0o222 == 0


def test_a_damaged_file_is_named_in_each_checkpoint_that_shares_it(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, state_of(), wait=True)
    _damage(Path(store.root) / "step-1" / "__0_0.distcp")
    for step in (1, 2):
        with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp"):
            store.verify(step)


def _damage(path: Path) -> None:
    """Change bytes and no times, as a disk does."""
    status = path.stat()
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, b"damage", 5000)
    os.close(descriptor)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("find", [CheckpointStore.verify, CheckpointStore.load, lambda store: store.prune(1)])
def test_a_save_after_damage_was_found_is_whole(store: CheckpointStore, find: Callable[[CheckpointStore], Any]) -> None:
    for step in (1, 2):
        store.save(step, state_of(), wait=True)
    _damage(Path(store.root) / "step-1" / "__0_0.distcp")
    with contextlib.suppress(CheckpointDamagedError):
        find(store)
    store.save(3, state_of(), wait=True)
    check_loads(store, 3, state_of())


def test_frozen_tensors_are_shared_from_the_third_save_on_if_more_is_trained(store: CheckpointStore) -> None:
    state = state_of()
    for step in range(1, 5):
        for layer in range(6):
            state["model"][f"layer {layer}"] = torch.randn(_NUM_ELEMENTS)
        store.save(step, state, wait=True)
        check_loads(store, step, state)
    num_bytes = sum(data_files(Path(store.root) / "step-1").values())
    assert num_new_bytes(Path(store.root), 2) > 0.9 * num_bytes
    assert num_new_bytes(Path(store.root), 3) < 0.65 * num_bytes
    assert num_new_bytes(Path(store.root), 4) < 0.65 * num_bytes


def test_many_small_changes_do_not_make_many_files(store: CheckpointStore) -> None:
    state = state_of(num_tensors=30)
    for step in range(1, 40):
        if step <= 30:
            state["model"][f"layer {step - 1}"] = torch.randn(_NUM_ELEMENTS)
        store.save(step, state, wait=True)
    assert len(data_files(Path(store.root) / "step-39")) <= 17
    assert num_new_bytes(Path(store.root), 39) < 10_000
    check_loads(store, 39, state)


def test_a_name_that_a_view_has_is_refused(store: CheckpointStore) -> None:
    base = torch.arange(100.0)
    state = {"random": {"base": base, "x": base[10:20], "x (view)": torch.full((10,), -1.0)}}
    with pytest.raises(CheckpointError, match="rename the key"):
        store.save(1, state, wait=True)


def test_a_replaced_checkpoint_shares_with_the_one_that_it_replaces(store: CheckpointStore) -> None:
    state = state_of()
    store.save(1, state, wait=True)
    before = data_files(Path(store.root) / "step-1")
    state["model"]["layer 3"] = torch.ones(_NUM_ELEMENTS)
    store.save(1, state, wait=True, overwrite=True)
    check_loads(store, 1, state)
    assert before.keys() & data_files(Path(store.root) / "step-1").keys()


def test_a_writer_that_was_killed_shares_nothing_at_first(store: CheckpointStore) -> None:
    store.save(1, state_of(), wait=True)
    process_id = store._background._resources.writer.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    state = state_of()
    for step in (2, 3):
        state["model"]["layer 3"] = torch.full((_NUM_ELEMENTS,), float(step))
        store.save(step, state, wait=True)
        check_loads(store, step, state)
    assert num_new_bytes(Path(store.root), 3) < sum(data_files(Path(store.root) / "step-3").values()) / 4


def test_a_save_that_fails_at_its_commit_is_no_base_of_the_next(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = state_of()
    store.save(1, state, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(NumberedDirectory, "commit", full)
        with pytest.raises(TransportError, match=os.strerror(errno.ENOSPC)):
            store.save(2, state_of(seed=5), wait=True)
    state["model"]["layer 3"] = torch.ones(_NUM_ELEMENTS)
    store.save(2, state, wait=True)
    check_loads(store, 1, state_of())
    check_loads(store, 2, state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_equal_bytes_of_another_dtype_are_written_again(store: CheckpointStore, dtype: torch.dtype) -> None:
    values = torch.arange(_NUM_ELEMENTS, dtype=torch.float32)
    store.save(1, {"w": values}, wait=True)
    store.save(2, {"w": values.view(dtype)}, wait=True)
    assert exact(store.load(2).state) == exact({"w": values.view(dtype)})
    loaded = {"w": torch.zeros_like(values.view(dtype))}
    dcp.load(loaded, checkpoint_id=Path(store.root) / "step-2", no_dist=True)
    assert exact(loaded["w"]) == exact(values.view(dtype))


def test_a_checkpoint_of_an_earlier_format_is_loaded(store: CheckpointStore) -> None:
    """Formats 1 and 2 name one data file for each rank."""
    store.save(1, state_of(), wait=True)
    directory = Path(store.root) / "step-1"
    forge_json(directory, "rank-0.json", lambda it: it.update(data_file=it.pop("data_files")[0]))
    forge_manifest(directory, lambda manifest: msgspec.structs.replace(manifest, format=1))
    check_loads(store, 1, state_of())
