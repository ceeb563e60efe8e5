"""Floating-point tensors are cast while a snapshot copies them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_equality import exact
from state_tools import file_of, manifest_of, open_stager, receive

from ft_transport.state.blocks import CASTABLE
from ft_transport.state.snapshot import Taking


def _cast(value: Any, dtype: torch.dtype) -> Any:
    match value:
        case dict():
            return {key: _cast(each, dtype) for key, each in value.items()}
        case list():
            return [_cast(each, dtype) for each in value]
        case torch.nn.Parameter():
            return torch.nn.Parameter(value.detach().to(dtype), requires_grad=value.requires_grad)
        case torch.Tensor() if value.dtype in CASTABLE:
            return value.to(dtype)
        case _:
            return value


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(6, 8, generator=generator)
    return {
        "whole": whole,
        "double": torch.randn(5, generator=generator, dtype=torch.float64),
        "half": torch.randn(7, generator=generator).half(),
        "brain": torch.randn(3, generator=generator).bfloat16(),
        "scalar": torch.tensor(0.1),
        "empty": torch.empty(0, 4),
        "columns": torch.randn(3, 4, generator=generator).t(),
        "every second": torch.randn(8, generator=generator)[::2],
        "negated": torch.view_as_complex(torch.randn(4, 2, generator=generator)).conj().imag,
        "nested": [{"parameter": torch.nn.Parameter(torch.randn(2, 2, generator=generator))}, 3, None, "text"],
        "integers": torch.arange(7),
        "flags": torch.ones(3) > 0,
        "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
        "scaled": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "number": 0.1,
    }


@pytest.mark.parametrize("dtype", CASTABLE, ids=str)
def test_floating_point_tensors_are_cast_and_nothing_else_is(dtype: torch.dtype) -> None:
    state = _state()
    with open_stager() as stager:
        snapshot = stager.begin(Taking(step=1, state=state, float_dtype=dtype)).finish()
        received = receive(file_of(snapshot))
        snapshot.close()
    expected = _cast(state, dtype)
    assert exact(received) == exact(expected)
    assert received["columns"].stride() == expected["columns"].stride()


def test_what_shares_memory_is_cast_once_and_shares_it_still() -> None:
    base = torch.arange(64.0)
    state = {"base": base, "same": base, "view": base[8:24].view(4, 4).t()}
    with open_stager() as stager:
        snapshot = stager.begin(Taking(step=1, state=state, float_dtype=torch.bfloat16)).finish()
        file = file_of(snapshot)
        snapshot.close()
    assert manifest_of(file).data_bytes == 64 * 2
    received = receive(file)
    assert exact(received) == exact({name: tensor.bfloat16() for name, tensor in state.items()})
    assert received["same"] is received["base"]
    assert received["view"].untyped_storage().data_ptr() == received["base"].untyped_storage().data_ptr()
