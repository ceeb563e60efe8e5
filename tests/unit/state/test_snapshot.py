"""Taking a snapshot: the file is safetensors, it never changes, and nothing is held after an error."""

from __future__ import annotations

import gc
import weakref
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from state_equality import exact, tensor_bytes
from state_tools import CHUNK_BYTES, file_of, file_of_state, manifest_of, open_stager, receive, take

from ft_transport.errors import SnapshotError, SnapshotLimitError, UnsupportedLeafError
from ft_transport.state.snapshot import PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.state.tensors import SAFETENSORS_NAMES
from ft_transport.wire.chunks import digest


def _state() -> dict[str, Any]:
    state: dict[str, Any] = {
        name: torch.arange(24, dtype=torch.uint8).view(dtype) if dtype is not torch.bool else torch.ones(3) > 0
        for dtype, name in SAFETENSORS_NAMES.items()
    }
    return {
        **state,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4, dtype=torch.int16),
        "columns": torch.arange(12.0).view(3, 4).t(),
        "odd": torch.arange(3, dtype=torch.uint8),
        "text": "not a tensor",
    }


def test_safetensors_opens_the_file_and_sees_equal_tensors(tmp_path: Path) -> None:
    state = _state()
    path = tmp_path / "full"
    path.write_bytes(file_of_state(state))
    loaded = safetensors.torch.load_file(path)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(loaded[name]) == tensor_bytes(tensor)
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata()["ft_transport.step"] == "7"
        assert exact(opened.get_tensor("F64")) == exact(state["F64"])
        assert exact(opened.get_slice("columns")[1:3]) == exact(state["columns"][1:3].contiguous())


def test_every_tensor_is_aligned_to_its_items_without_holes() -> None:
    file = file_of_state(_state())
    manifest = manifest_of(file)
    assert manifest.header_bytes % 4096 == 0
    sizes = {name: dtype.itemsize for dtype, name in SAFETENSORS_NAMES.items()}
    assert all(tensor.start % sizes[tensor.dtype] == 0 for tensor in manifest.tensors)
    assert sum(tensor.end - tensor.start for tensor in manifest.tensors) == manifest.data_bytes
    assert len(file) == manifest.total_bytes


def test_the_steps_of_adam_shift_no_weight() -> None:
    state = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.ones(32, 4), "half": torch.ones(32, dtype=torch.bfloat16)}
        for number in range(20)
    }
    entries = manifest_of(file_of_state(state)).tensors
    weights = [entry for entry in entries if not entry.name.endswith("step")]
    assert len(weights) == 40
    assert [entry.name for entry in weights if entry.start % 64] == []


def test_the_digests_are_those_of_the_chunks() -> None:
    file = file_of_state({"a": torch.arange(50_000), "b": torch.ones(3)})
    manifest = manifest_of(file)
    data = file[manifest.header_bytes :]
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    assert len(chunks) > 5
    assert list(manifest.digests) == [digest(chunk) for chunk in chunks]


def test_a_large_state_is_copied_by_all_threads_and_right() -> None:
    state = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (3_000_001, 5, 1_500_000, 0, 700_003)]
    state.append(torch.arange(600_000).view(600, 1000).t())
    assert exact(receive(file_of_state(state))) == exact(state)


def test_later_changes_of_the_state_do_not_reach_a_snapshot() -> None:
    tensor, array = torch.zeros(1000), bytearray(b"x" * 5000)
    state = {"t": tensor, "a": array, "l": [1]}
    with open_stager() as stager:
        snapshot = take(stager, 1, state)
        tensor.fill_(1)
        array[:] = b"y" * 5000
        state["l"].append(2)
        received = receive(file_of(snapshot))
        snapshot.close()
    assert received["t"].sum() == 0
    assert received["a"] == b"x" * 5000
    assert received["l"] == [1]


def test_a_snapshot_that_is_read_never_changes_while_others_are_taken() -> None:
    with open_stager(max_snapshots=2) as stager:
        held = take(stager, 0, torch.full((10_000,), -1.0))
        before = file_of(held)
        for step in range(1, 20):
            snapshot = take(stager, step, torch.full((10_000 + step,), float(step)))
            assert receive(file_of(snapshot))[0] == step
            snapshot.close()
        assert file_of(held) == before
        held.close()


def test_the_limit_holds_until_one_is_closed() -> None:
    with open_stager(max_snapshots=2) as stager:
        alive = [take(stager, 1, torch.ones(3)), take(stager, 1, torch.ones(3))]
        assert alive[0].snapshot_id != alive[1].snapshot_id
        with pytest.raises(SnapshotLimitError, match=r"at most 2 snapshots alive at once \(max_snapshots\)") as caught:
            take(stager, 3, torch.ones(3))
        assert caught.value.retryable
        alive.pop(0).close()
        alive.append(take(stager, 3, torch.ones(3)))
        for snapshot in alive:
            snapshot.close()


def test_a_refused_state_and_an_error_of_the_callers_own_function_take_no_arena() -> None:
    def deferrable(tensor: torch.Tensor) -> bool:
        raise KeyError("mine")

    with open_stager(max_snapshots=1) as stager:
        for _ in range(3):
            with pytest.raises(UnsupportedLeafError):
                stager.begin(Taking(step=1, state=[torch.ones(3), object()]))
            with pytest.raises(KeyError, match="mine"):
                stager.begin(Taking(step=1, state=torch.ones(3), deferrable=deferrable))
        take(stager, 1, torch.ones(3)).close()


def test_what_is_deferrable_is_copied_later_and_the_rest_at_once() -> None:
    large, small, column = torch.zeros(5000), torch.zeros(5), torch.zeros(100, 50).t()
    with open_stager() as stager:
        pending = stager.begin(
            Taking(step=1, state=[large, small, column], deferrable=lambda tensor: tensor.numel() >= 5000)
        )
        for tensor in (large, small, column):
            tensor.fill_(1)
        pending.copy_deferred()
        large.fill_(2)
        snapshot = pending.finish()
        received = receive(file_of(snapshot))
        snapshot.close()
    assert [tensor.mean() for tensor in received] == [1, 0, 1]


def _fail(*_: object) -> None:
    raise MemoryError


def _complete(pending: PendingSnapshot) -> None:
    pending.copy_deferred()
    pending.finish()


@pytest.mark.parametrize("fails", ["", "_resources.copier.copy", "_resources.copier.digests", "_arena.write_header"])
def test_what_is_abandoned_or_fails_gives_the_arena_back_once(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    with open_stager(max_snapshots=1) as stager:
        pending = stager.begin(Taking(step=1, state=torch.ones(5), deferrable=lambda tensor: True))
        if fails:
            owner, name = fails.rsplit(".", 1)
            with monkeypatch.context() as patch:
                patch.setattr(attrgetter(owner)(pending), name, _fail)
                with pytest.raises(MemoryError):
                    _complete(pending)
        else:
            pending.abandon()
        # The only arena there may be is free, and to abandon the snapshot again does not free it a second time.
        first = take(stager, 2, torch.ones(5))
        pending.abandon()
        with pytest.raises(SnapshotLimitError):
            take(stager, 3, torch.ones(5))
        first.close()


def test_a_snapshot_lets_go_of_the_live_tensors() -> None:
    gc.disable()
    try:
        tensor = torch.ones(1000)
        view = tensor[3:5]
        alive = [weakref.ref(tensor), weakref.ref(view)]
        with open_stager() as stager:
            snapshot = take(stager, 1, [tensor, view])
            del tensor, view
            assert [reference() for reference in alive] == [None, None]
            snapshot.close()
    finally:
        gc.enable()


def test_closing_ends_the_threads_and_the_files_but_not_a_snapshot_that_is_read() -> None:
    stager = Stager(max_snapshots=2, num_threads=2, chunk_bytes=CHUNK_BYTES)
    snapshot = take(stager, 1, torch.arange(1000))
    before = file_of(snapshot)
    stager.close()
    assert file_of(snapshot) == before
    with pytest.raises(SnapshotError, match="shut down"):
        take(stager, 2, torch.ones(1))
    snapshot.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_of(snapshot)


def test_a_snapshot_that_is_under_way_at_the_end_fails_with_a_typed_error() -> None:
    with open_stager() as stager:
        large = torch.ones(3 << 20, dtype=torch.uint8)
        copying = stager.begin(Taking(step=1, state=large, deferrable=lambda tensor: True))
        finishing = stager.begin(Taking(step=2, state=large))
    with pytest.raises(SnapshotError, match="shut down"):
        copying.copy_deferred()
    with pytest.raises(SnapshotError, match="shut down"):
        finishing.finish()
