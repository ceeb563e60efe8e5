"""What a delta holds, and what is no delta."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.errors import ManifestError
from ft_transport.wire.delta import Bytes, TensorPair, apply_changes, decode_delta, encode_delta

NUM_BYTES = 5 << 20


def weights(seed: int, num_bytes: int = NUM_BYTES) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def changed(base: Bytes, item_bytes: int, at: list[int]) -> Bytes:
    new = base.copy()
    new.view(f"<u{item_bytes}")[at] ^= 3
    return new


def applied(encoded: bytes, bases: dict[str, Bytes]) -> dict[str, Bytes]:
    result = {name: base.copy() for name, base in bases.items()}
    for change in decode_delta(encoded).changes():
        apply_changes(change, result[change.tensor.name])
    return result


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_what_changed_arrives_bit_by_bit(item_bytes: int) -> None:
    base = weights(1)
    num_items = NUM_BYTES // item_bytes
    # The first, the last, neighbours, and some that are farther from the one before than a byte can say.
    new = changed(base, item_bytes, [0, 1, 254, 255, 256, 600, num_items // 2, num_items - 1])
    encoded = encode_delta(7, 5, [TensorPair("w", item_bytes, base, new)])
    assert encoded is not None
    assert len(encoded) < 400
    delta = decode_delta(encoded)
    assert (delta.base, delta.version, delta.num_bytes) == (5, 7, len(encoded))
    assert [(each.name, each.num_bytes, each.num_changed) for each in delta.tensors] == [("w", NUM_BYTES, 8)]
    assert np.array_equal(applied(encoded, {"w": base})["w"], new)


@given(
    sizes=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 300)), min_size=1, max_size=5),
    every=st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_tensors_of_all_sizes_arrive(sizes: list[tuple[int, int]], every: int, seed: int) -> None:
    bases = {f"t{at}": weights(seed + at, item * number) for at, (item, number) in enumerate(sizes)}
    # In one tensor of a megabyte little changes, so that a delta is worth it.
    bases["large"] = weights(seed)
    news = {name: base.copy() for name, base in bases.items()}
    for new in news.values():
        new[seed % every :: max(every, len(new) // 1000)] += 1
    pairs = [TensorPair(f"t{at}", item, bases[f"t{at}"], news[f"t{at}"]) for at, (item, _) in enumerate(sizes)]
    encoded = encode_delta(2, 1, [*pairs, TensorPair("large", 2, bases["large"], news["large"])])
    assert encoded is not None
    for name, tensor in applied(encoded, bases).items():
        assert np.array_equal(tensor, news[name]), name


def test_one_percent_of_random_bits_takes_less_than_two_percent_of_the_bytes() -> None:
    base = weights(1, 16 << 20)
    new = base.copy()
    chance = np.random.default_rng(2)
    at = chance.choice(8 << 20, (8 << 20) // 100, replace=False)
    new.view("<u2")[at] ^= chance.integers(1, 1 << 16, len(at), dtype=np.uint16)
    encoded = encode_delta(2, 1, [TensorPair("w", 2, base, new)])
    assert encoded is not None
    assert len(encoded) < 0.02 * len(base)


def test_applied_twice_it_undoes_itself() -> None:
    base = weights(1)
    encoded = encode_delta(2, 1, [TensorPair("w", 2, base, changed(base, 2, [5, 70_000]))])
    assert encoded is not None
    assert np.array_equal(applied(encoded, applied(encoded, {"w": base}))["w"], base)


def test_the_memory_of_a_pair_may_change_when_the_next_pair_is_requested() -> None:
    bases = {name: weights(seed) for seed, name in enumerate("abc")}
    news = {name: changed(base, 2, [5, 70_000]) for name, base in bases.items()}
    expected = encode_delta(2, 1, [TensorPair(name, 2, bases[name], news[name]) for name in bases])

    def one_by_one() -> Iterator[TensorPair]:
        memory = np.empty_like(bases["a"])
        for name, base in bases.items():
            memory[:] = news[name]
            yield TensorPair(name, 2, base, memory)
            base[:] = memory

    assert encode_delta(2, 1, one_by_one(), num_bytes=3 * NUM_BYTES) == expected is not None


def test_where_chunks_are_smaller_or_more_than_an_eighth_would_be_taken_there_is_none() -> None:
    base = weights(1)
    half, every_tenth = base.copy(), base.copy()
    half[: 2 << 20] = weights(3, 2 << 20)
    every_tenth.view("<u2")[::10] ^= 1
    # The last one: nothing changed, and nothing of it would be fetched either.
    for new in (weights(2), half, every_tenth, base):
        assert encode_delta(2, 1, [TensorPair("w", 2, base, new)]) is None


def encoded_delta() -> bytes:
    base = weights(1, 2 << 20)
    encoded = encode_delta(2, 1, [TensorPair("w", 2, base, changed(base, 2, [5, 9, 1000, 70_000]))])
    assert encoded is not None
    return encoded


def test_a_damaged_byte_is_found_or_changes_no_more_than_elements_of_the_tensor() -> None:
    """The frames have checksums; of the header, only what describes the changes decides where they go."""
    encoded = encoded_delta()
    base = weights(1, 2 << 20)
    num_found = 0
    for at in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[at] ^= 1 << (at % 8)
        try:
            for change in decode_delta(damaged).changes():
                assert 0 <= int(change.positions[0]) <= int(change.positions[-1]) < change.tensor.num_items
                assert len(change.positions) == len(change.bits) == change.tensor.num_changed
        except ManifestError:
            num_found += 1
    assert num_found > len(encoded) / 2
    assert np.array_equal(applied(encoded, {"w": base})["w"].view("<u2")[[5]], base.view("<u2")[[5]] ^ 3)


@pytest.mark.parametrize("length", [0, 7, 8, 9, 40])
def test_what_ends_early_is_none(length: int) -> None:
    with pytest.raises(ManifestError):
        decode_delta(encoded_delta()[:length])


def test_a_frame_that_announces_more_than_it_may_is_not_begun() -> None:
    encoded = encoded_delta()
    length = int.from_bytes(encoded[:8], "little")
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    frames = encoded[8 + length :]
    header = msgspec.msgpack.decode(encoded[8 : 8 + length])
    header[-1][0] = len(bomb)
    packed = msgspec.msgpack.encode(header)
    forged = len(packed).to_bytes(8, "little") + packed + bomb + frames[len(frames) - sum(header[-1][1:]) :]
    with pytest.raises(ManifestError, match=r"a frame of 4 bytes in a delta, got 67108864"):
        decode_delta(forged)


def test_changes_that_take_more_memory_than_allowed_are_not_decompressed() -> None:
    encoded = encoded_delta()
    needed = decode_delta(encoded).memory_bytes
    assert decode_delta(encoded, max_bytes=needed).memory_bytes == needed
    # As small as its zeros are: a few kB for gigabytes.
    num_items = 1 << 40
    header = [1, 2, 1, [["w", num_items, 1, num_items, 0]], 0, [0, 0, 0]]
    packed = msgspec.msgpack.encode(header)
    forged = len(packed).to_bytes(8, "little") + packed
    with pytest.raises(ManifestError, match=f"at most {1 << 30} bytes of memory, got one that takes {11 * num_items}"):
        decode_delta(forged, max_bytes=1 << 30)


def test_a_header_that_takes_more_memory_than_allowed_is_not_decoded() -> None:
    packed = msgspec.msgpack.encode([1, 2, 1, [["", 0, 1, 0, 0]] * 1000, 0, [0, 0]])
    with pytest.raises(ManifestError, match=f"at most 100000 bytes of memory, got a header of {len(packed)}"):
        decode_delta(len(packed).to_bytes(8, "little") + packed, max_bytes=100_000)


@pytest.mark.parametrize("surplus", [b"\x91" * 5_000 + b"\x01", b"\xa1\xff", b"\xdd\xff\xff\xff\xff"])
def test_a_header_with_more_than_it_should_have_is_no_delta(surplus: bytes) -> None:
    """What is not asked for is skipped: nested without end, characters that are none, an array that is not there."""
    header = b"\x97" + msgspec.msgpack.encode([1, 2, 1, [], 0, [0, 0]])[1:] + surplus
    with pytest.raises(ManifestError):
        decode_delta(len(header).to_bytes(8, "little") + header)
