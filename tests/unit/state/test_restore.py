"""Receiving: into the receiver's own tensors where they fit, and never half."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from state_equality import exact
from state_tools import deliver, file_of_state, manifest_of, manifest_with, receive
from torch import nn

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.state import restore as restore_module
from ft_transport.state.restore import Restore
from ft_transport.wire.nodes import LayoutNode, SequenceNode, TensorNode


class Point(NamedTuple):
    x: Any
    y: Any


def _restore(state: object, into: object = None) -> tuple[Restore, bytes]:
    file = file_of_state(state)
    return Restore(manifest_of(file), into=into), file


# ── in place ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensors_that_fit_are_the_receivers_own_objects() -> None:
    state = OrderedDict(
        a=torch.arange(6.0).view(2, 3),
        b=[torch.ones(2, dtype=torch.int16), (torch.zeros(3),)],
        c={7: Point(torch.ones(1), deque([torch.full((4,), 2.0)])), True: torch.ones(5)},
        p=nn.Parameter(torch.arange(3.0)),
    )
    own = OrderedDict(
        a=torch.zeros(2, 3),
        b=[torch.zeros(2, dtype=torch.int16), (torch.ones(3),)],
        c={7: Point(torch.zeros(1), deque([torch.zeros(4)])), True: torch.zeros(5)},
        p=nn.Parameter(torch.zeros(3)),
    )
    restore, file = _restore(state, own)
    deliver(restore, file, manifest_of(file))
    assert exact(own) == exact(state), "they are received into directly"
    received = restore.finish()
    assert exact(received) == exact(state) == exact(own)
    assert received["a"] is own["a"]
    assert received["b"][0] is own["b"][0]
    assert received["b"][1][0] is own["b"][1][0]
    assert received["c"][7].x is own["c"][7].x
    assert received["c"][7].y[0] is own["c"][7].y[0]
    assert received["c"][True] is own["c"][True]
    assert received["p"] is own["p"]
    assert received is not own


def test_what_was_sent_once_for_three_places_is_the_receivers_own_tensor_at_each() -> None:
    sent, own = torch.arange(3.0), torch.zeros(3)
    received = receive(file_of_state({"a": sent, "b": sent, 5: sent}), into={"a": own, "b": own, 5: own})
    assert exact(own) == exact(sent)
    for place in ("a", "b", 5):
        assert received[place] is own


def test_a_tensor_of_the_receivers_at_another_place_is_not_taken_for_the_one_that_was_sent() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    received = receive(
        file_of_state({"a": torch.ones(3), "b": torch.full((3,), 2.0)}), into={"b": one, "a": other, "c": one}
    )
    assert received["b"] is one
    assert received["a"] is other
    assert exact(received) == exact({"a": torch.ones(3), "b": torch.full((3,), 2.0)})


@pytest.mark.parametrize(
    "own",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(8).as_strided((2, 3), (1, 1)),
        torch.zeros(2, 3).to_sparse(),
        np.zeros((2, 3), np.float32),
        "text",
        None,
        [1, 2],
    ],
    ids=lambda own: f"{type(own).__name__} {getattr(own, 'dtype', '')} {tuple(getattr(own, 'shape', ()))}",
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_what_does_not_fit_is_left_alone(own: object) -> None:
    before = own.to_dense().clone() if isinstance(own, torch.Tensor) and not own.is_meta else None
    state = [torch.arange(6.0).view(2, 3)]
    received = receive(file_of_state(state), into=[own])
    assert exact(received) == exact(state)
    assert received[0] is not own
    if isinstance(own, torch.Tensor) and before is not None:
        assert torch.equal(own.to_dense(), before)


def test_a_freed_storage_and_a_wrapper_subclass_receive_nothing() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    freed = torch.zeros(2, 3)
    freed.untyped_storage().resize_(0)
    state = [torch.arange(6.0).view(2, 3), torch.ones(4)]
    received = receive(file_of_state(state), into=[freed, TwoTensor(torch.zeros(4), torch.zeros(4))])
    assert exact(received) == exact(state)


def test_a_receiver_of_another_length_or_other_keys_is_used_where_it_matches() -> None:
    state = {"a": [torch.ones(2), torch.ones(3)], "b": torch.ones(4), "new": torch.ones(5)}
    own = {"a": [torch.zeros(2)], "b": torch.zeros(4), "old": torch.zeros(6)}
    received = receive(file_of_state(state), into=own)
    assert exact(received) == exact(state)
    assert received["b"] is own["b"]
    assert received["a"][0] is own["a"][0]
    assert own["old"].sum() == 0


def test_a_parameter_and_a_plain_tensor_share_memory_but_each_is_what_was_sent() -> None:
    own = [nn.Parameter(torch.zeros(3)), torch.zeros(3), nn.Parameter(torch.zeros(3)), torch.zeros(3)]
    state = [
        torch.arange(3.0),
        nn.Parameter(torch.arange(3.0)),
        nn.Parameter(torch.arange(3.0), requires_grad=False),
        torch.arange(3.0).requires_grad_(),
    ]
    received = receive(file_of_state(state), into=own)
    assert exact(received) == exact(state)
    assert [tensor.data_ptr() for tensor in received] == [tensor.data_ptr() for tensor in own]


def test_an_empty_tensor_of_another_dtype_is_not_taken_for_the_one_that_was_sent() -> None:
    state = [nn.Parameter(torch.zeros(0, 3)), torch.zeros(0, 3)]
    own = [nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16)), torch.zeros(0, 3, dtype=torch.int8)]
    assert exact(receive(file_of_state(state), into=own)) == exact(state)


# ── receivers that share memory ───────────────────────────────────────────────────────────────────────────────────

_T, _U = torch.arange(4.0).view(2, 2), torch.arange(10.0, 14.0).view(2, 2)


def _overlapping() -> list[torch.Tensor]:
    flat = torch.zeros(6)
    return [flat[:4].view(2, 2), flat[2:].view(2, 2), torch.zeros(2, 2)]


def _shared(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    def make() -> list[torch.Tensor]:
        tensor = torch.zeros(2, 2)
        return [tensor, view(tensor), torch.zeros(2, 2)]

    return make


def _last_two_shared() -> list[torch.Tensor]:
    tensor = torch.zeros(2, 2)
    return [torch.zeros(2, 2), tensor, tensor]


def _strided_shared() -> list[torch.Tensor]:
    tensor = torch.zeros(2, 2).t()
    return [tensor, tensor, tensor]


_SENT = [
    [_T, _U, _U + 5],
    [_T, _T, _U],
    [_T, _U, _U],
    [_T, _T, _T],
    [_T.t(), _U, _U.t()],
    [_T.t(), _T.t(), _U.t()],
    [_T, _T.t(), _T.view(4)[1:3].expand(2, 2)],
]


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(_overlapping, id="overlapping"),
        pytest.param(_shared(lambda tensor: tensor), id="tied"),
        pytest.param(_shared(lambda tensor: tensor.t()), id="a transpose"),
        pytest.param(_shared(lambda tensor: tensor.view(torch.int32)), id="another dtype"),
        pytest.param(_shared(lambda tensor: tensor.view(4)), id="another shape"),
        pytest.param(_last_two_shared, id="last two tied"),
        pytest.param(_strided_shared, id="all the same transpose"),
        pytest.param(lambda: [torch.zeros(2, 2) for _ in range(3)], id="apart"),
        pytest.param(lambda: [torch.zeros(2, 2).t() for _ in range(3)], id="transposed apart"),
    ],
)
def test_every_tensor_is_right_whoever_shares_memory(own: Callable[[], list[torch.Tensor]]) -> None:
    for state in _SENT:
        received = receive(file_of_state(state), into=own())
        assert [tensor.tolist() for tensor in received] == [tensor.tolist() for tensor in state]
        assert [tensor.dtype for tensor in received] == [tensor.dtype for tensor in state]


def test_of_two_receivers_of_one_tensor_both_get_it() -> None:
    own = [torch.zeros(2, 2), torch.zeros(2, 2)]
    received = receive(file_of_state([_T, _T]), into=own)
    assert received[0] is own[0]
    assert received[1] is own[1]
    assert torch.equal(own[0], _T)
    assert torch.equal(own[1], _T)


# ── copies at the end ─────────────────────────────────────────────────────────────────────────────────────────────

_TARGETS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "the same strides": (torch.arange(6.0).view(2, 3).t(), torch.zeros(2, 3).t()),
    "row-major into columns": (torch.arange(6.0).view(3, 2), torch.zeros(2, 3).t()),
    "columns into row-major": (torch.arange(6.0).view(2, 3).t(), torch.zeros(3, 2)),
    "channels last": (
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ),
    "expanded into dense": (torch.arange(3.0).expand(2, 3), torch.zeros(2, 3)),
    "into every second column": (torch.arange(6.0).view(2, 3), torch.zeros(2, 6)[:, ::2]),
    "complex128": (torch.arange(4.0).to(torch.complex128), torch.zeros(4, dtype=torch.complex128)),
    "a conjugate": (torch.arange(4.0) * torch.tensor(1 + 2j), torch.zeros(4, dtype=torch.complex64).conj()),
    "bits that torch cannot copy": (
        torch.arange(4, dtype=torch.uint8).view(torch.int4).view(2, 2),
        torch.zeros(4, dtype=torch.uint8).view(torch.int4).view(2, 2).t(),
    ),
}


@pytest.mark.parametrize("kind", sorted(_TARGETS))
def test_a_tensor_of_another_layout_is_copied_to_at_the_end(kind: str) -> None:
    sent, target = _TARGETS[kind]
    around = target.untyped_storage()
    restore, file = _restore([sent], [target])
    deliver(restore, file, manifest_of(file))
    assert not restore.destination_touched
    assert not any(around.tolist()), "nothing is written before all is there"
    received = restore.finish()[0]
    assert received is target
    assert restore.destination_touched
    assert exact(received.resolve_conj())[6] == exact(sent)[6]


def test_a_contradiction_is_found_before_any_copy() -> None:
    tree = SequenceNode("list", [TensorNode(1), LayoutNode(0, "float32", (4,), (1,))])
    own = [torch.zeros(3, 2).t(), torch.zeros(4)]
    restore = Restore(manifest_with(tree), into=own)
    for view in restore.buffers(0, 32):
        view[:] = b"\1" * len(view)
    with pytest.raises(ManifestError, match="expected as many bytes as float32"):
        restore.finish()
    assert own[0].sum() == 0
    assert own[1].sum() == 0


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("own", ["nothing", "some", "all"])
def test_the_buffers_of_any_ranges_cover_the_data_exactly(own: str) -> None:
    state = [
        torch.arange(100.0),
        torch.zeros(0),
        torch.arange(7, dtype=torch.int8),
        torch.arange(33, dtype=torch.int16),
    ]
    into = {"nothing": None, "some": [torch.zeros(100), None, None, torch.zeros(33, dtype=torch.int16)],
            "all": [torch.zeros_like(tensor) for tensor in state]}[own]  # fmt: skip
    restore, file = _restore(state, into)
    manifest = manifest_of(file)
    assert restore.buffers(0, 0) == []
    for start in range(manifest.data_bytes):
        views = restore.buffers(start, min(start + 50, manifest.data_bytes))
        assert all(view.format == "B" and not view.readonly and view.ndim == 1 and len(view) for view in views)
        assert sum(len(view) for view in views) == min(50, manifest.data_bytes - start)
    # Each byte has one place: what is written one by one is read back as a whole.
    for position in range(manifest.data_bytes):
        restore.buffers(position, position + 1)[0][0] = position % 251
    whole = b"".join(bytes(view) for view in restore.buffers(0, manifest.data_bytes))
    assert whole == bytes(position % 251 for position in range(manifest.data_bytes))


def test_memory_that_was_freed_is_not_written_to() -> None:
    own = [torch.zeros(100), torch.zeros(100)]
    restore, file = _restore([torch.ones(100), torch.ones(100)], own)
    own[1].untyped_storage().resize_(0)
    deliver(restore, file, manifest_of(file), 0, 400)
    with pytest.raises(RestoreError, match=r"its memory, but the memory was freed.*\(.*1"):
        restore.buffers(400, 800)
    assert own[0].sum() == 100
    restore.poison()
    assert own[0].isnan().all()


@pytest.mark.parametrize("num_bytes_kept", [0, 600])
def test_memory_of_a_view_that_was_freed_is_not_written_to(num_bytes_kept: int) -> None:
    flat = torch.zeros(200)
    own = [flat[:100], flat[100:]]
    restore, _ = _restore([torch.ones(100), torch.ones(100)], own)
    flat.untyped_storage().resize_(num_bytes_kept)
    with pytest.raises(RestoreError, match="the memory was freed"):
        restore.buffers(400, 800)
    restore.poison()
    assert not num_bytes_kept or own[0].isnan().all()


def test_a_snapshot_over_the_limit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of_state(torch.ones(100))
    monkeypatch.setattr(restore_module, "MEMORY_BYTES", 399)
    with pytest.raises(RestoreError, match=r"at most 399 bytes, the memory of this machine, got 400.*step 7"):
        receive(file)
    monkeypatch.setattr(restore_module, "MEMORY_BYTES", 400)
    assert receive(file).sum() == 100


def test_memory_that_is_not_there_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_module, "MEMORY_BYTES", 1 << 60)
    endless = torch.zeros(1 << 50, dtype=torch.uint8, device="meta")
    manifest = manifest_with(TensorNode(0), [endless], chunk_bytes=1 << 40)
    with pytest.raises(RestoreError, match="bytes of memory to receive into"):
        Restore(manifest)


def test_a_small_tensor_does_not_keep_the_large_ones_alive() -> None:
    received = receive(file_of_state([torch.ones(3), torch.ones(1 << 16)]))
    assert received[0].untyped_storage().nbytes() == 12


# ── poison ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_fetch_that_failed_the_receiver_reads_as_nan() -> None:
    state = [torch.arange(100.0), torch.arange(5), torch.ones(4) > 0, torch.ones(4, dtype=torch.bfloat16)]
    own = [torch.zeros_like(tensor) for tensor in state]
    restore, file = _restore(state, own)
    assert not restore.destination_touched
    deliver(restore, file, manifest_of(file), 0, 100)
    assert restore.destination_touched
    restore.poison()
    assert own[0].isnan().all()
    assert own[3].isnan().all()
    assert own[1].tolist() == [-1] * 5
    assert own[2].view(torch.uint8).tolist() == [1] * 4  # all bits set are no bool


def test_a_receiver_that_took_nothing_in_place_is_never_touched() -> None:
    own = [torch.zeros(100).view(10, 10).t(), torch.zeros(3)]
    restore, file = _restore([torch.ones(10, 10), torch.ones(4)], own)
    deliver(restore, file, manifest_of(file), 0, 300)
    restore.poison()
    assert not restore.destination_touched
    assert own[0].sum() == 0
    assert own[1].sum() == 0


def test_copies_that_failed_midway_are_poisoned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.zeros(10, 10).t(), torch.zeros(4).expand(1, 4).t(), (torch.zeros(6) > 0).view(2, 3).t()]
    restore, file = _restore([torch.ones(10, 10), torch.ones(4, 1), torch.zeros(3, 2) > 0], own)
    deliver(restore, file, manifest_of(file))
    module = "ft_transport.state.bounce_buffers._copy_one"
    calls: list[object] = []

    def fails_at_the_second(target: torch.Tensor, source: torch.Tensor) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        target.copy_(source)

    with monkeypatch.context() as patch:
        patch.setattr(module, fails_at_the_second)
        with pytest.raises(RuntimeError, match="the device is gone"):
            restore.finish()
    assert restore.destination_touched
    restore.poison()
    assert own[0].isnan().all()
    assert own[2].all()
