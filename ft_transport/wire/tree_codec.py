"""Encodes and decodes the tree of a state as text, with work and memory bounded by the length of the text.

Decoding JSON takes linear time. Two other costs are bounded before decoding: the number of arrays, since an array of
two characters takes a hundred bytes of memory, and their depth, if Python itself does not bound it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec
import numpy as np

from ft_transport.errors import ManifestError
from ft_transport.runtime.garbage_collector import collector_paused
from ft_transport.wire.nodes import MAX_DEPTH, Node

MAX_ARRAYS: Final = 1 << 21
"""Maximum number of arrays in a tree. A container or tensor takes one or two, so a million of them are allowed."""

CheckTime: TypeAlias = Callable[[], None]
"""Called repeatedly by long loops; raises `DeadlineExceededError` after the deadline."""

STRIDE: Final = 1 << 10
"""Steps of a loop between two checks of the time."""

_MAX_TEXT_DEPTH: Final = 4 * MAX_DEPTH
"""Maximum depth of arrays: a container takes two levels, and a leaf in it a few more."""
_USUAL_RECURSION_LIMIT: Final = 10_000
"""Up to this limit, Python stops a decoder's recursion before the thread's stack overflows."""
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_PIECE: Final = re.compile(rb'(?:[^"]{1,256}|"[^"\\]*(?:\\.[^"\\]*)*"){1,256}', re.DOTALL)
"""Several whole strings, and the text between them."""

_decoder: Final = msgspec.json.Decoder(Node)
_encoder: Final = msgspec.json.Encoder()


def unbounded() -> None:
    """A `CheckTime` without a deadline."""


def encode_tree(tree: Node, *, step: int) -> str:
    """Encode a tree as text.

    Args:
        tree: The tree.
        step: The committed step, for errors.

    Raises:
        ManifestError: The tree has more containers and tensors than a receiver accepts.
    """
    encoded = _encoder.encode(tree)
    if (num_arrays := _num_arrays(encoded)) > MAX_ARRAYS:
        raise ManifestError(
            f"expected a state of at most {MAX_ARRAYS} nested containers, tensors and other leaves that JSON does not "
            f"have, got {num_arrays}; put what belongs together into tensors",
            step=step,
        )
    return encoded.decode()


def decode_tree(text: str, *, peer: str | None, check_time: CheckTime = unbounded) -> Node:
    """Decode a tree. The input is untrusted.

    Args:
        text: The received text.
        peer: The sender, for errors.
        check_time: Called repeatedly.

    Raises:
        ManifestError: Too many arrays, or too deep nesting.
        DeadlineExceededError: ``check_time`` raised it.
        msgspec.MsgspecError: The text is not a tree.
        RecursionError: The nesting exceeds Python's recursion limit.
    """
    encoded = text.encode()
    if (num_arrays := _num_arrays(encoded, check_time)) > MAX_ARRAYS:
        raise ManifestError(f"expected a tree of at most {MAX_ARRAYS} arrays, got {num_arrays}", peer=peer)
    if sys.getrecursionlimit() > _USUAL_RECURSION_LIMIT and (depth := _depth(encoded, check_time)) > _MAX_TEXT_DEPTH:
        raise ManifestError(
            f"expected a tree of at most {_MAX_TEXT_DEPTH} arrays in each other, got {depth}", peer=peer
        )
    with collector_paused():
        tree: Node = _decoder.decode(encoded)
        return tree


def _num_arrays(encoded: bytes, check_time: CheckTime = unbounded) -> int:
    """Return the number of arrays; up to `MAX_ARRAYS` a fast count, which includes brackets inside strings."""
    num_brackets = encoded.count(b"[")
    if num_brackets <= MAX_ARRAYS:
        return num_brackets
    return sum(piece.count(b"[") for piece in _without_strings(encoded, check_time))


def _depth(encoded: bytes, check_time: CheckTime) -> int:
    depth = deepest = 0
    for piece in _without_strings(encoded, check_time):
        characters = np.frombuffer(piece, np.uint8)
        steps = (characters == ord("[")).astype(np.int32) - (characters == ord("]"))
        depths = steps.cumsum(dtype=np.int32)
        deepest = max(deepest, depth + int(depths.max(initial=0)))
        depth += int(steps.sum())
    return deepest


def _without_strings(encoded: bytes, check_time: CheckTime) -> Iterator[bytes]:
    """Yield the text outside strings in pieces, which bounds memory and allows checks of the time."""
    for piece in _PIECE.finditer(encoded):
        check_time()
        yield _STRING.sub(b"", piece.group())
