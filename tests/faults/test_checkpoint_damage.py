"""Files of a checkpoint that differ from what was written: no bit of them is loaded, and an older one stands in."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoint_damage as script
import pytest
import torch
from damage import append, flip_bit, truncate
from ranks import run_ranks
from state_equality import exact

from ft_transport import CheckpointDamagedError, CheckpointStore
from ft_transport.checkpoint.manifest import CHUNK_BYTES, decode_sealed

_TIMEOUT_S = 150
_DATA, _RANK, _METADATA, _MANIFEST = "__0_0.distcp", "rank-0.json", ".metadata", "manifest.json"
_FILES = (_DATA, _RANK, _METADATA, _MANIFEST)
_NUM_RANDOM = 2


def state(value: int) -> dict[str, Any]:
    return {
        "model": {"large": torch.full((CHUNK_BYTES * 9 // 16,), float(value)), "b": torch.full((5,), float(value))},
        "progress": {"step": value, "note": "x" * 100, "blob": bytes([value % 256]) * 1000},
        "random": torch.full((17,), float(value)),
    }


def values_of(state: dict[str, Any]) -> list[float]:
    tensors = [*state.values(), *state.get("model", {}).values()]
    return torch.cat([each for each in tensors if isinstance(each, torch.Tensor)]).unique().tolist()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 to 3, each with its number in every value."""
    root = tmp_path_factory.mktemp("template") / "root"
    with CheckpointStore(root, rank_local=("random",)) as store:
        for step in (1, 2, 3):
            store.save(step, state(step), wait=True)
    assert sorted(each.name for each in (root / "step-3").iterdir()) == sorted(_FILES)
    # Else a damaged chunk behind a good one would not be among the cases.
    assert CHUNK_BYTES * 2 < (root / "step-3" / _DATA).stat().st_size < CHUNK_BYTES * 3
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    # Links: a test replaces what it damages.
    return Path(shutil.copytree(template, tmp_path / "root", copy_function=os.link))


@contextmanager
def reading(root: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(root, rank_local=("random",), read_only=True) as store:
        yield store


def damage(path: Path, how: Callable[[Path], None]) -> None:
    whole = path.with_name("whole")
    path.rename(whole)
    shutil.copyfile(whole, path)
    whole.unlink()
    how(path)


def places_in(path: Path, seed: int) -> list[tuple[int, int]]:
    """Byte and bit: the ends of the file and of its chunks, and any others."""
    num_bytes = path.stat().st_size
    chunks = range(CHUNK_BYTES, num_bytes, CHUNK_BYTES)
    chosen = {0, num_bytes - 1, *chunks, *(start - 1 for start in chunks)}
    draw = random.Random(seed)
    chosen.update(draw.randrange(num_bytes) for _ in range(_NUM_RANDOM))
    return [(at, draw.randrange(8)) for at in sorted(chosen)]


def expect_damage(store: CheckpointStore, name: str) -> None:
    """Verifying names the file; loading does, too, and leaves nothing that could be trained on."""
    with pytest.raises(CheckpointDamagedError) as caught:
        store.verify(3)
    assert caught.value.files == (name,)
    assert name in str(caught.value)
    into = state(-1)
    with pytest.raises(CheckpointDamagedError) as caught:
        store.load(3, into=into)
    assert caught.value.files == (name,)
    assert name in str(caught.value)
    if getattr(caught.value, "destination_touched", False):
        assert all(map(math.isnan, values_of(into["model"])))
        assert all(math.isnan(value) or value == -1 for value in values_of(into))
    else:
        assert values_of(into) == [-1]
    # Nothing of a damaged one is given away whole either.
    with pytest.raises(CheckpointDamagedError):
        store.load(3)


def expect_fallback(store: CheckpointStore, step: int = 2) -> None:
    into = state(-1)
    loaded = store.load_newest_good(into=into)
    assert loaded is not None
    assert loaded.step == step
    assert loaded.state["model"]["large"] is into["model"]["large"]
    assert exact(loaded.state) == exact(state(step))


@pytest.mark.parametrize("name", _FILES)
def test_one_bit_that_has_flipped_is_found_by_verifying_and_by_loading(root: Path, name: str) -> None:
    path = root / "step-3" / name
    with reading(root) as store:
        for at, bit in places_in(path, random.randrange(1 << 32)):
            print(f"byte {at}, bit {bit}")  # Where it was, should it fail.
            damage(path, lambda file, at=at, bit=bit: flip_bit(file, at, bit))
            expect_damage(store, name)
            expect_fallback(store)
            flip_bit(path, at, bit)
        store.verify(3)
        expect_fallback(store, 3)


def test_each_bit_of_the_list_of_files_counts(root: Path) -> None:
    encoded = (root / "step-3" / _MANIFEST).read_bytes()
    decode_sealed(encoded, name=_MANIFEST)
    for at in range(8 * len(encoded)):
        changed = bytearray(encoded)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(CheckpointDamagedError) as caught:
            decode_sealed(bytes(changed), name=_MANIFEST)
        assert caught.value.files == (_MANIFEST,)


def test_a_chunk_that_only_dcp_reads_is_found_by_verifying_alone(tmp_path: Path) -> None:
    """DCP has values of its own; a load takes them from elsewhere, and reads what it returns and nothing else."""
    saved = {"w": torch.arange(1000), "text": "x" * (2 * CHUNK_BYTES)}
    with CheckpointStore(tmp_path) as store:
        store.save(1, saved, wait=True)
        path = tmp_path / "step-1" / _DATA
        flip_bit(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointDamagedError) as caught:
            store.verify()
        assert caught.value.files == (_DATA,)
        assert exact(store.load().state) == exact(saved)


_LENGTHS: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: truncate(path, 0),
    "a byte shorter": lambda path: truncate(path, path.stat().st_size - 1),
    "half": lambda path: truncate(path, path.stat().st_size // 2),
    "a byte longer": append,
    "a chunk longer": lambda path: truncate(path, path.stat().st_size + CHUNK_BYTES),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [*((_DATA, how) for how in _LENGTHS), (_RANK, "emptied"), (_METADATA, "a byte longer"), (_MANIFEST, "half")],
)
def test_another_length_is_found_before_a_byte_lands(root: Path, name: str, how: str) -> None:
    damage(root / "step-3" / name, _LENGTHS[how])
    with reading(root) as store:
        expect_damage(store, name)
        into = state(-1)
        with pytest.raises(CheckpointDamagedError):
            store.load(3, into=into)
        assert values_of(into) == [-1]
        expect_fallback(store)


@pytest.mark.parametrize("name", [_DATA, _RANK, _METADATA])
def test_a_file_that_is_gone_is_named(root: Path, name: str) -> None:
    (root / "step-3" / name).unlink()
    with reading(root) as store:
        expect_damage(store, name)
        expect_fallback(store)


def test_all_damaged_files_are_named_at_once(root: Path) -> None:
    for name in (_DATA, _METADATA):
        damage(root / "step-3" / name, lambda path: flip_bit(path, 10))
    with reading(root) as store, pytest.raises(CheckpointDamagedError) as caught:
        store.verify(3)
    assert sorted(caught.value.files) == sorted([_DATA, _METADATA])


def test_files_of_another_checkpoint_are_not_taken_for_its_own(root: Path) -> None:
    """Of the right length, and without a flaw of their own."""
    for name in (_DATA, _RANK):
        damage(root / "step-3" / name, lambda path, name=name: shutil.copyfile(root / "step-2" / name, path) and None)
        with reading(root) as store, pytest.raises(CheckpointDamagedError):
            store.load(3)


@pytest.mark.parametrize(
    ("damaged", "keep", "removed"),
    [
        ((), 1, (1, 2)),
        ((3,), 1, (1,)),
        ((3,), 2, (1,)),
        ((2, 3), 1, ()),
        ((2,), 1, (1, 2)),
        ((1, 2, 3), 1, ()),
        ((2,), 7, ()),
    ],
)
def test_pruning_never_removes_the_last_good_one(
    root: Path, damaged: tuple[int, ...], keep: int, removed: tuple[int, ...]
) -> None:
    for step in damaged:
        damage(root / f"step-{step}" / _DATA, lambda path: flip_bit(path, CHUNK_BYTES + 1))
    with CheckpointStore(root, rank_local=("random",)) as store:
        assert store.prune(keep) == removed
        left = tuple(step for step in (1, 2, 3) if step not in removed)
        assert store.steps() == left
        assert sorted(each.name for each in root.iterdir()) == [".owner", *(f"step-{step}" for step in left)]
        good = [step for step in left if step not in damaged]
        assert good or len(damaged) == 3
        if good:
            expect_fallback(store, good[-1])


@pytest.mark.parametrize(("keep", "num_saved"), [(1, 3), (2, 3), (4, 3), (4, 6)])
def test_the_newest_are_kept_and_no_others(tmp_path: Path, keep: int, num_saved: int) -> None:
    with CheckpointStore(tmp_path, keep=keep) as store:
        for step in range(1, num_saved + 1):
            store.save(step, {"n": step}, wait=True)
    # A store that is closed has deleted what it wanted to.
    left = range(max(1, num_saved - keep + 1), num_saved + 1)
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{step}" for step in left}


@pytest.mark.timeout(_TIMEOUT_S + 30)
@pytest.mark.parametrize("read", ["once", pytest.param("each", marks=pytest.mark.long)])
def test_what_one_rank_finds_or_cannot_read_is_one_error_on_all_of_them(tmp_path: Path, read: str) -> None:
    root = tmp_path / "root"
    run_ranks(script.__file__, script.NUM_RANKS, str(root), str(tmp_path), read, timeout_s=_TIMEOUT_S)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(script.NUM_RANKS))
    last = first.pop()
    assert last == second.pop()
    assert last["whole_again"] == [script.NEW]
    assert last["unreadable"] == {
        "once": [script.NEW, script.NEW, [script.NEW]],
        "always": ["RankFailedError", errno.ESTALE, 1],
        "broken disk": [script.OLD, script.OLD, [script.OLD]],
    }
    # Some chunks are needed by both ranks, some by one; each was flipped.
    assert len(first) == len(second) >= 4
    assert {case["file"] for case in first} == {"__0_0.distcp", "__1_0.distcp"}
    for one, other in zip(first, second, strict=True):
        assert one["kind"] == other["kind"] == "CheckpointDamagedError"
        # What had landed in its own tensors each rank knows for itself.
        assert one["error"].partition("; the receiver")[0] == other["error"].partition("; the receiver")[0]
        for case in (one, other):
            assert case["files"] == case["verified"] == [case["file"]]
            assert case["is_poisoned"] if case["is_touched"] else case["is_unchanged"]
            assert case["good"] == [script.OLD, script.OLD, [script.OLD]]
    assert any(case["is_touched"] for case in first)
