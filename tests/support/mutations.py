"""Small changes to bytes, at random: what a fuzzer makes of an input that is well-formed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[\[\]{},:]|true|false|null')
_INTS = (
    0, 1, -1, 2, 7, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**61 - 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, -(2**63),
    -(2**63) - 1, 2**64, 10**25, 10**400,
)  # fmt: skip
_NUMBERS = (*(str(number).encode() for number in _INTS), b"1e400", b"-0.0", b"1e-400", b"0.1")
_BYTES = (
    b"\0", b"\xff", b"\x80", b"\x7f", b"[", b"]", b"{", b"}", b'"', b"\\", b",", b"\n", b" ", b"\xed\xa0\x80",
    b"\\ud800",
)  # fmt: skip
_MAX_BYTES = 20_000


class Mutator:
    """Changes inputs. The same seed gives the same changes.

    Args:
        seed: Of the random numbers.
        words: What the format is made of.
    """

    def __init__(self, seed: int, words: Sequence[bytes]) -> None:
        self._random = random.Random(seed)
        self._words = (*words, *_BYTES)

    def of(self, corpus: Sequence[bytes], num_seeds: int) -> bytes:
        """One of the corpus, every second time one of its first ``num_seeds``, with one change or a few."""
        draw = self._random.random
        data = corpus[int(draw() * (num_seeds if draw() < 0.5 else len(corpus)))]
        for _ in range(1 + int(draw() * draw() * 6)):
            data = self._changed(data, corpus)
        return data if len(data) <= _MAX_BYTES else data[:_MAX_BYTES]

    def _changed(self, data: bytes, corpus: Sequence[bytes]) -> bytes:
        draw = self._random.random
        if not data:
            return self._words[int(draw() * len(self._words))]
        at = int(draw() * len(data))
        match int(draw() * 14):
            case 0:
                return data[:at] + bytes((data[at] ^ (1 << int(draw() * 8)),)) + data[at + 1 :]
            case 1:
                return data[:at] + bytes((int(draw() * 256),)) + data[at + 1 :]
            case 2:
                return data[:at] + data[at + 1 + int(draw() * draw() * 40) :]
            case 3:
                return data[: at + 1 + int(draw() * draw() * 40)] + data[at:]
            case 4:
                return data[:at] + self._words[int(draw() * len(self._words))] + data[at:]
            case 5:
                return data[:at]
            case 6:
                other = corpus[int(draw() * len(corpus))]
                return data[:at] + other[int(draw() * len(other)) :]
            case 7 | 8:
                return self._with_token(data, at, _NUMBER, _NUMBERS)
            case 9:
                return self._with_token(data, at, _TOKEN, self._words)
            case 10 | 11 | 12:
                return self._with_array(data, at, corpus)
            case _:
                # A part of it again and again.
                piece = data[at : at + 1 + int(draw() * 20)]
                return data[:at] + piece * int(2 + draw() ** 4 * 3000) + data[at:]

    def _with_array(self, data: bytes, at: int, corpus: Sequence[bytes]) -> bytes:
        """Another array in place of one, or behind one, so that the nesting stays right."""
        start, end = _array(data, at)
        other = corpus[int(self._random.random() * len(corpus))]
        if self._random.random() < 0.5:
            other = self._words[int(self._random.random() * len(self._words))]
        other_start, other_end = _array(other, int(self._random.random() * (len(other) + 1)))
        piece = other[other_start:other_end] or b"0"
        if self._random.random() < 0.3:
            return data[:end] + b"," + piece + data[end:]
        return data[:start] + piece + data[end:]

    def _with_token(self, data: bytes, at: int, kind: re.Pattern[bytes], others: Sequence[bytes]) -> bytes:
        """Another in place of the first token from ``at`` on, or behind it."""
        found = kind.search(data, at) or kind.search(data)
        if found is None:
            return data + others[int(self._random.random() * len(others))]
        other = others[int(self._random.random() * len(others))]
        return data[: found.start()] + other + data[found.end() :]


def _array(data: bytes, at: int) -> tuple[int, int]:
    """Where an array near ``at`` begins and ends, as far as brackets say; nothing where there is none."""
    start = data.rfind(b"[", 0, at + 1)
    depth = 0
    for position in range(max(0, start), min(len(data), start + 2000)):
        if data[position] == 0x5B:
            depth += 1
        elif data[position] == 0x5D:
            depth -= 1
            if not depth:
                return start, position + 1
    return at, at
