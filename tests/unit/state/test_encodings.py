"""Encodings that users register, and the kinds that torch and Python bring along."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from state_equality import exact
from state_tools import file_of_state, receive, round_trip

from ft_transport import register_encoding
from ft_transport.errors import ConfigurationError, ManifestError, RestoreError, SnapshotError, UnsupportedLeafError
from ft_transport.state import encodings
from ft_transport.wire.nodes import ConstantNode


@dataclass
class Ema:
    decay: float
    shadow: torch.Tensor


class Other:
    pass


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_by_type", {})
    monkeypatch.setattr(encodings, "_by_name", {})


def _register(**changes: Any) -> None:
    register_encoding(
        changes.pop("type", Ema),
        **{
            "name": "test.ema",
            "encode": lambda ema: {"decay": ema.decay, "shadow": ema.shadow},
            "decode": lambda value: Ema(**value),
            **changes,
        },
    )


def test_a_registered_type_makes_the_trip_with_its_tensors() -> None:
    _register()
    received = round_trip({"ema": [Ema(0.5, torch.arange(3.0))]})
    ema = received["ema"][0]
    assert type(ema) is Ema
    assert (ema.decay, ema.shadow.tolist()) == (0.5, [0.0, 1.0, 2.0])


def test_a_registered_type_may_hold_another_of_its_kind() -> None:
    register_encoding(Other, name="test.other", encode=vars, decode=_other)
    value = _other({"inner": _other({"x": 1})})
    assert round_trip(value).inner.x == 1
    value.inner = value
    with pytest.raises(SnapshotError, match="contains itself"):
        round_trip(value)


def _other(attributes: dict[str, Any]) -> Other:
    value = Other()
    vars(value).update(attributes)
    return value


def test_an_unregistered_type_is_refused_at_the_sender_and_subclasses_are_not_meant() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"test_encodings.Ema.*register_encoding.*at ema"):
        round_trip({"ema": Ema(0.5, torch.ones(1))})
    _register()

    class Special(Ema):
        pass

    with pytest.raises(UnsupportedLeafError, match="Special"):
        round_trip({"ema": Special(0.5, torch.ones(1))})


def test_a_receiver_without_the_encoding_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    _register()
    file = file_of_state({"a": [Ema(0.5, torch.ones(1))]})
    monkeypatch.setattr(encodings, "_by_name", {})
    with pytest.raises(RestoreError, match=r"'test.ema' to be registered.*at a.0"):
        receive(file)


def test_the_same_encoding_may_be_registered_again() -> None:
    _register()
    _register(decode=lambda value: Ema(value["decay"] + 1, value["shadow"]))
    assert round_trip(Ema(0.5, torch.ones(1))).decay == 1.5


@pytest.mark.parametrize("changes", [{"name": "test.other"}, {"type": Other}])
def test_a_clash_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    _register()
    with pytest.raises(ConfigurationError, match=r"'test.ema' is registered for Ema"):
        _register(**changes)
    assert round_trip(Ema(0.5, torch.ones(1))).decay == 0.5
    assert encodings.encoding_for_type(Other) is None
    assert encodings.encoding_for_name("test.other") is None


def test_an_encoding_that_fails_is_an_error_with_a_path() -> None:
    _register(encode=lambda ema: 1 / 0)
    with pytest.raises(SnapshotError, match=r"'test.ema' failed: ZeroDivisionError.*at x.0") as caught:
        round_trip({"x": [Ema(0.5, torch.ones(1))]})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_encoding_that_makes_what_is_not_supported_is_an_error_with_a_path() -> None:
    _register(encode=lambda ema: {"inner": object()})
    with pytest.raises(UnsupportedLeafError, match=r"at x.inner"):
        round_trip({"x": Ema(0.5, torch.ones(1))})


def test_a_decoding_that_fails_is_an_error_with_a_path() -> None:
    _register(decode=lambda value: Ema(value["nothing"], value["like it"]))
    file = file_of_state({"x": [Ema(0.5, torch.ones(1))]})
    with pytest.raises(RestoreError, match=r"could not decode a value: KeyError.*at x.0"):
        receive(file)


_LEAVES = [
    2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**1000, -(2**1000), True, False, None,
    0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324, complex("-nan+infj"), complex(-0.0, 0.0),
    "", "\0", "☃", "\ud800", "a\udfffb", b"", b"\0\xff", bytearray(b"x"), b"x" * 4096, b"x" * 4097, bytearray(9999),
    torch.Size([]), torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.device("cuda:1"), torch.strided,
    torch.sparse_coo, torch.preserve_format, (), [], {}, set(), frozenset({1, (2, 3)}), deque([1], 3), deque(),
    np.float16(1.5), np.bool_(True), np.datetime64("2026-01-02T03:04", "m"), np.timedelta64(3, "D"), np.str_("x"),
    np.longdouble(1) / 3, np.void(b"ab"), np.datetime64("NaT", "s"), np.array(3), np.array([], dtype="<M8[ns]"),
    np.array(["a", "bc\0d"]), np.arange(6, dtype=">i4").reshape(2, 3).T, np.zeros((0, 3), np.complex64),
]  # fmt: skip


def test_a_leaf_comes_back_bit_for_bit() -> None:
    for leaf, received in zip(_LEAVES, round_trip(_LEAVES), strict=True):
        assert exact(received) == exact(leaf)


def test_a_received_array_can_be_written() -> None:
    readonly = np.frombuffer(b"\0" * 8, dtype=np.int32)
    received = round_trip(readonly)
    received += 1
    assert received.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_quantized_tensor_keeps_its_scale(dtype: torch.dtype) -> None:
    value = torch.quantize_per_tensor(torch.randn(2, 3, 4, 4), 0.1, 3, dtype)
    for state in (value, value.to(memory_format=torch.channels_last), value[:0]):
        assert exact(round_trip({"a": state})["a"]) == exact(state)


def test_an_unknown_device_is_refused() -> None:
    for name in ("warp:1", "", "cuda:300", "cuda:-1", "cpu:x", "float32"):
        with pytest.raises(ManifestError, match=r"expected a device that torch .* has"):
            encodings.decode_constant(ConstantNode("device", name))
