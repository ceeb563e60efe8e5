"""``fetch(known=AllBut(...))``: what is left out stays as it is, and the rest comes verified in few requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from faulty_transports import TIMEOUT, port_of, transport
from proxy import corrupt, proxied

from ft_transport import AllBut, HTTPTransport, RestoreError

NUM_LAYERS = 300
SMALL = 8
NUM_BYTES = NUM_LAYERS * SMALL * 4


def layers(value: float) -> dict[str, Any]:
    """Small tensors between large ones, and a state that the receiver does not have."""
    return {
        "weights": {
            f"{number:03}": [torch.full((64, 64), value), torch.full((SMALL,), value)] for number in range(300)
        },
        "state": [torch.full((1000,), value)],
        "step": value,
    }


def otherwise(state: dict[str, Any]) -> dict[str, Any]:
    """The same values in tensors that nothing is received into in place, as on a device."""
    return {
        **state,
        "weights": {key: [part[0].t().contiguous().t(), part[1]] for key, part in state["weights"].items()},
    }


def is_left_out(name: str, own: Sequence[torch.Tensor]) -> bool:
    return name.startswith("state.") or any(each.numel() > SMALL for each in own)


def received(source: str, receiver: HTTPTransport[Any], into: dict[str, Any], max_bytes: int = NUM_BYTES) -> Any:
    known = AllBut(is_left_out=is_left_out, max_bytes=max_bytes)
    return receiver.fetch(source, 1, into=into, known=known)


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_is_left_out_stays_and_the_rest_comes(is_in_place: bool, same_host: bool) -> None:
    with transport() as source, transport(4, same_host=same_host) as receiver:
        source.send_checkpoint([], 1, layers(1.0), TIMEOUT)
        own = layers(7.0)
        del own["state"]
        into = own if is_in_place else otherwise(own)
        found = received(source.metadata(), receiver, into)
    assert found.num_bytes_fetched == NUM_BYTES
    assert found.state["step"] == 1.0
    for large, small in into["weights"].values():
        assert large.eq(7.0).all()
        assert small.eq(1.0).all()


def test_damage_in_transit_is_found() -> None:
    with transport() as source, transport(1, same_host=False) as receiver, proxied(port_of(source)) as proxy:
        source.send_checkpoint([], 1, layers(1.0), TIMEOUT)
        into = layers(7.0)
        proxy.inject(corrupt(NUM_BYTES // 2), on="/slices")
        received(proxy.url, receiver, into)
        assert proxy.num_faulty == 1
        assert all(small.eq(1.0).all() for _, small in into["weights"].values())


def test_more_than_allowed_is_refused_and_nothing_changes() -> None:
    with transport() as source, transport() as receiver:
        source.send_checkpoint([], 1, layers(1.0), TIMEOUT)
        into = layers(7.0)
        with pytest.raises(RestoreError, match=f"expected at most 100 bytes besides .* got {NUM_BYTES}"):
            received(source.metadata(), receiver, into, max_bytes=100)
        assert all(part.eq(7.0).all() for parts in into["weights"].values() for part in parts)
