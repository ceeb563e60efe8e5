from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.wire.chunks import CHUNK_BYTES, PLAIN, ChunkTable, Digester, Hasher, chunk_bytes_for, digest
from ft_transport.wire.signing import Key


def test_the_digest_is_xxh3_64_as_published() -> None:
    # The empty input with seed 0: XSUM_XXH3_testdata in the reference implementation (xxHash, cli/xsum_sanity_check.c).
    assert digest(b"") == PLAIN.digest(b"") == 0x2D06800538D394C2
    assert not PLAIN.is_keyed


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=5))
def test_piece_by_piece_is_the_same_as_at_once(data: bytes, cuts: list[int]) -> None:
    hasher = Hasher()
    start = 0
    for end in [*sorted(cuts), len(data)]:
        hasher.update(memoryview(data)[start:end])
        start = max(start, min(end, len(data)))
    assert hasher.intdigest() == digest(data) == digest(memoryview(data))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_changed_bit_changes_the_digest(data: bytes, choose: st.DataObject) -> None:
    damaged = bytearray(data)
    damaged[choose.draw(st.integers(0, len(data) - 1))] ^= 1 << choose.draw(st.integers(0, 7))
    assert digest(bytes(damaged)) != digest(data)


@pytest.mark.parametrize(
    ("data_bytes", "expected"),
    [
        (0, 1 << 20),
        ((512 << 20) - 1, 1 << 20),
        (512 << 20, 2 << 20),
        ((1 << 30) - 1, 2 << 20),
        (1 << 30, 4 << 20),
        (1 << 40, 4 << 20),
    ],
)
def test_small_states_have_small_chunks(data_bytes: int, expected: int) -> None:
    assert chunk_bytes_for(data_bytes, most=CHUNK_BYTES) == expected


def test_chunks_are_never_larger_than_the_setting() -> None:
    assert chunk_bytes_for(1 << 40, most=1 << 16) == 1 << 16
    assert chunk_bytes_for(0, most=1 << 16) == 1 << 16


def test_the_range_of_several_chunks_ends_with_the_data() -> None:
    chunks = ChunkTable(data_bytes=10, chunk_bytes=4)
    assert chunks.num_chunks == 3
    assert chunks.range_of(1, 3) == (4, 10)
    assert ChunkTable(data_bytes=0, chunk_bytes=4).num_chunks == 0
    assert ChunkTable(data_bytes=8, chunk_bytes=4).range_of(0, 2) == (0, 8)


OURS, FOREIGN = Key.of(b"ours" * 8), Key.of(b"evil" * 8)
DATA = memoryview(bytes(range(256)) * 40)


@pytest.mark.parametrize("digester", [PLAIN, Digester.of(OURS)])
def test_pieces_are_digested_as_one(digester: Digester) -> None:
    whole = digester.digest(DATA)
    assert whole == digester.digest_of([DATA[:1], DATA[1:777], DATA[777:777], DATA[777:]])
    assert 0 <= whole < 2**64
    assert whole != digester.digest(DATA[:-1])


def test_another_key_makes_another_digest() -> None:
    digests = {PLAIN.digest(DATA), Digester.of(OURS).digest(DATA), Digester.of(FOREIGN).digest(DATA)}
    assert len(digests) == 3
    assert Digester.of(OURS) == Digester.of(OURS)
    assert "ours" not in repr(Digester.of(OURS))


def test_with_a_context_a_digest_is_of_that_place_alone() -> None:
    digester = Digester.of(OURS)

    def digest(context: bytes, data: memoryview = DATA) -> int:
        hasher = digester.hasher(context)
        hasher.update(data)
        return hasher.intdigest()

    assert len({digest(b""), digest(b"a"), digest(b"b"), digest(b"ab", DATA[1:])}) == 4
    # What is context cannot be passed off as data.
    assert digest(b"ab", memoryview(b"c")) != digest(b"a", memoryview(b"bc"))


def test_a_manifests_name_finds_the_digester_of_whoever_has_the_key() -> None:
    name = Digester.of(OURS).name
    assert Digester.named(name, [FOREIGN, OURS]) == Digester.of(OURS)
    assert Digester.named(name, [FOREIGN]) is None
    assert Digester.named(name, []) is None
    assert Digester.named(f"md5 {OURS.key_id}", [OURS]) is None
    assert Digester.named("", [OURS]) is None


def test_where_there_is_a_key_digests_that_everybody_can_make_are_refused() -> None:
    assert Digester.named(PLAIN.name, []) == PLAIN
    assert Digester.named(PLAIN.name, [OURS]) is None
