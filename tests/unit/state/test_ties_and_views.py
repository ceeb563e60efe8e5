"""Tensors that share memory at the sender share it at the receiver, and read it in the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_equality import exact
from state_tools import file_of_state, manifest_of, receive, round_trip
from torch import nn

from ft_transport.state import encodings
from ft_transport.state.flatten import flatten


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _data_bytes(state: object) -> int:
    return manifest_of(file_of_state(state)).data_bytes


# ── ties ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_tensor_at_two_places_is_stored_once_and_is_one_again() -> None:
    tensor = torch.arange(10.0)
    state = {"a": tensor, "b": [tensor, tensor.detach()]}
    assert _data_bytes(state) == 40
    received = round_trip(state)
    assert received["a"] is received["b"][0] is received["b"][1]
    assert exact(received) == exact(state)


def test_one_parameter_at_two_places_is_one_again() -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    received = round_trip({"a": parameter, "b": parameter, "data": parameter.data})
    assert received["a"] is received["b"]
    assert type(received["a"]) is nn.Parameter
    assert type(received["data"]) is torch.Tensor
    received["data"].fill_(7)
    assert received["a"].tolist() == [7.0] * 4


def test_a_dtensor_and_its_local_shard_share_memory_again(one_rank_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    state = {"sharded": sharded, "again": sharded, "local": sharded.to_local()}
    assert _data_bytes(state) == 16
    received = round_trip(state, into={"sharded": sharded})
    assert _same_memory(received["sharded"].to_local(), received["local"])
    assert _same_memory(received["again"].to_local(), received["local"])


def test_equal_and_empty_tensors_are_no_ties() -> None:
    received = round_trip([torch.ones(3), torch.ones(3)])
    received[0].fill_(2)
    assert received[1].tolist() == [1.0] * 3
    state = [torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int8)]
    received = round_trip(state)
    assert exact(received) == exact(state)
    assert received[0] is not received[1]


def test_what_encodings_make_on_the_fly_is_never_taken_for_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy:
        def __init__(self, number: int) -> None:
            self.number = number

    monkeypatch.setattr(encodings, "_by_type", {})
    monkeypatch.setattr(encodings, "_by_name", {})
    # Each conjugate lives for a moment only, and the next one gets its address.
    encodings.register_encoding(
        Lazy,
        name="test.lazy",
        encode=lambda value: torch.full((64,), complex(value.number, 1)).conj(),
        decode=lambda tensor: Lazy(int(tensor[0].real)),
    )
    received = round_trip([Lazy(number) for number in range(50)])
    assert [value.number for value in received] == list(range(50))


# ── views ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_VIEWS = {
    "a slice": lambda base: base[1:3],
    "the beginning": lambda base: base[:2],
    "the end": lambda base: base[-1:],
    "one element": lambda base: base[2, 3],
    "a column": lambda base: base[:, 1],
    "every second": lambda base: base[:, ::2],
    "the transpose": lambda base: base.t(),
    "another shape": lambda base: base.view(6, 4),
    "expanded": lambda base: base[1].expand(5, 6),
    "windows": lambda base: base.view(-1).unfold(0, 3, 2),
    "the diagonal": lambda base: base.diagonal(),
}


@pytest.mark.parametrize("order", ["base first", "view first"])
@pytest.mark.parametrize("kind", sorted(_VIEWS))
def test_a_view_into_another_tensor_is_one_again(kind: str, order: str) -> None:
    base = torch.arange(24.0).view(4, 6)
    view = _VIEWS[kind](base)
    state = {"base": base, "view": view} if order == "base first" else {"view": view, "base": base}
    file = file_of_state(state)
    assert manifest_of(file).data_bytes == base.nbytes
    received = receive(file)
    assert received["view"].stride() == view.stride()
    assert torch.equal(received["view"], view)
    received["base"].mul_(-1)
    assert torch.equal(received["view"], -view)
    assert torch.equal(received["base"], -base)


def test_the_entry_is_named_by_the_base_whoever_comes_first() -> None:
    base = torch.arange(6.0)
    manifest = manifest_of(file_of_state({"view": base[2:4], "base": base}))
    assert [(tensor.name, tensor.shape) for tensor in manifest.tensors] == [("base", (6,))]


def test_a_view_of_a_view_is_one_too() -> None:
    base = torch.arange(24.0).view(4, 6)
    state = [base[1:3], base, base[1:3][1], base[2, 1:4]]
    assert _data_bytes(state) == base.nbytes
    received = round_trip(state)
    received[1].fill_(3)
    assert all(bool((tensor == 3).all()) for tensor in received)


def test_parameters_that_are_views_of_one_flat_buffer_stay_so() -> None:
    flat = torch.arange(10.0)
    state = {"flat": flat, "w": nn.Parameter(flat[:6].view(2, 3)), "b": nn.Parameter(flat[6:], requires_grad=False)}
    own_flat = torch.zeros(10)
    own = {
        "flat": own_flat,
        "w": nn.Parameter(own_flat[:6].view(2, 3)),
        "b": nn.Parameter(own_flat[6:], requires_grad=False),
    }
    file = file_of_state(state)
    fresh = receive(file)
    assert exact(fresh) == exact(state)
    fresh["flat"].zero_()
    assert fresh["w"].abs().sum() == 0
    received = receive(file, into=own)
    assert exact(received) == exact(state)
    assert received["flat"] is own_flat
    assert received["w"] is own["w"]
    assert received["b"] is own["b"]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(lambda t: [t[:6], t[4:]], id="partial overlap"),
        pytest.param(lambda t: [t[:6], t[4:8], t[5:7]], id="inside of two that overlap"),
        pytest.param(lambda t: [t, t.view(torch.int32)], id="another dtype"),
        pytest.param(lambda t: [t, t.view(torch.int32)[2:4], t[1:3]], id="another dtype inside"),
        pytest.param(lambda t: [t[::2], t[1::2]], id="interleaved"),
        pytest.param(lambda t: [t.view(2, 5).t(), t.view(2, 5)[1]], id="inside of one that is not row-major"),
        pytest.param(lambda t: [t.view(5, 2)[:, :1], t.view(5, 2)[:, 1:], t[3:5]], id="columns"),
        pytest.param(lambda t: [t[3:3], t, t[:0]], id="empty slices"),
        pytest.param(lambda t: [t, t.expand(3, 10), t[:1].expand(7)], id="expanded"),
        pytest.param(lambda t: [t[1:], t[:-1], t], id="two that overlap inside a third"),
    ],
)
def test_whatever_overlaps_comes_back_right_into_any_receiver(state: Any) -> None:
    value = state(torch.arange(10.0))
    file = file_of_state(value)
    assert exact(receive(file)) == exact(value)
    own = state(torch.full((10,), -1.0))
    assert exact(receive(file, into=own)) == exact(value)
    apart = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in value]
    assert exact(receive(file, into=apart)) == exact(value)


def test_conjugates_and_negatives_of_a_view_are_stored_on_their_own() -> None:
    base = torch.arange(6.0).to(torch.complex64) * (1 + 1j)
    part = base[1:3]
    for state in (
        [base, part.conj(), part, part.conj().imag],
        [part.conj().imag, part, part.conj(), base],
        [base.conj(), base, base.conj()],
    ):
        received = round_trip(state)
        assert exact(received) == exact(state)
    received = round_trip([base, part.conj(), part])
    assert _same_memory(received[2], received[0])


def test_views_into_a_dtype_that_safetensors_lacks_come_back_right() -> None:
    base = torch.arange(6.0).to(torch.complex128)
    state = [base[1:3], base, base[::2]]
    assert exact(round_trip(state)) == exact(state)


# ── strides ───────────────────────────────────────────────────────────────────────────────────────────────────────

_LAYOUTS = {
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "expanded inside": lambda: torch.randn(2, 1, 3).expand(2, 5, 3),
    "expanded and transposed": lambda: torch.randn(3, 4).t().unsqueeze(1).expand(4, 2, 3),
    "transposed complex128": lambda: torch.randn(3, 4, dtype=torch.complex128).t(),
    "transposed bits": lambda: torch.arange(12, dtype=torch.uint8).view(torch.int4).view(3, 4).t(),
}


@pytest.mark.parametrize("kind", sorted(_LAYOUTS))
def test_a_dense_layout_is_kept(kind: str) -> None:
    tensor = _LAYOUTS[kind]()
    received = round_trip({"a": tensor, "b": tensor})
    assert received["a"].stride() == tensor.stride()
    assert received["a"] is received["b"]
    assert exact(received["a"]) == exact(tensor)
    # Expanded dimensions are not paid for at the receiver.
    distinct = 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if step else 1
    assert received["a"].untyped_storage().nbytes() == distinct * tensor.dtype.itemsize


def test_holes_are_not_kept_and_not_sent() -> None:
    tensor = torch.arange(40.0).view(4, 10)[:, ::3]
    assert _data_bytes(tensor) == 16 * 4
    received = round_trip(tensor)
    assert received.is_contiguous()
    assert torch.equal(received, tensor)


def test_a_tensor_with_holes_is_a_plain_entry() -> None:
    from ft_transport.wire.nodes import TensorNode

    assert flatten(torch.arange(40.0)[::3]).tree == TensorNode(0)
