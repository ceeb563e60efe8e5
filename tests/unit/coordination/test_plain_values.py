"""What ranks tell each other is a value of the expected kind, or an error with a type."""

from __future__ import annotations

import msgspec
import pytest

from ft_transport.coordination.plain_values import from_json, from_msgpack
from ft_transport.errors import PeerProtocolError


def test_a_value_of_the_kind_comes() -> None:
    assert from_json(b'{"a":1}', msgspec.json.Decoder(dict[str, int])) == {"a": 1}
    assert from_msgpack(b"\x92\x01\x02", msgspec.msgpack.Decoder(list[int])) == [1, 2]


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\xff", b'"\xff"', b"[" * 100_000, b"\x91" * 100_000, b'{"a":"b"}', b"\xdd\xff\xff\xff\xff", b"\xa1\xff"],
)
def test_anything_else_is_a_typed_error(encoded: bytes) -> None:
    for decode in (
        lambda: from_json(encoded, msgspec.json.Decoder(dict[str, int])),
        lambda: from_msgpack(encoded, msgspec.msgpack.Decoder(dict[str, int])),
    ):
        with pytest.raises(PeerProtocolError, match="expected a dict of another rank") as caught:
            decode()
        assert len(str(caught.value)) < 1000
