"""The tree of a state as text, and what of it a receiver takes: no more work or memory than the text justifies.

Decoding JSON is linear in its length. What is not is bounded here, before anything is decoded: how many arrays there
are, for one of two characters costs a hundred bytes, and how deep they nest, where Python itself does not bound that.
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
"""Most arrays in a tree: one or two for each container and each tensor, so that a million of them go through."""

CheckTime: TypeAlias = Callable[[], None]
"""Called now and then by what takes long; raises `DeadlineExceededError` when no time is left."""

STRIDE: Final = 1 << 10
"""After so many steps of a loop the time is looked at."""

_MAX_TEXT_DEPTH: Final = 4 * MAX_DEPTH
"""Arrays around arrays: a container takes two of them, and a leaf in it a few more."""
_USUAL_RECURSION_LIMIT: Final = 10_000
"""Up to here, Python ends a decoder's recursion before the stack of the thread ends."""
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_PIECE: Final = re.compile(rb'(?:[^"]{1,256}|"[^"\\]*(?:\\.[^"\\]*)*"){1,256}', re.DOTALL)
"""Some texts, whole, and what stands between them."""

_decoder: Final = msgspec.json.Decoder(Node)
_encoder: Final = msgspec.json.Encoder()


def unbounded() -> None:
    """The `CheckTime` of what has no deadline."""


def encode_tree(tree: Node, *, step: int) -> str:
    """The tree as text.

    Args:
        tree: The tree.
        step: The committed step, for the error.

    Raises:
        ManifestError: It has more containers and tensors than a receiver takes.
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
    """The inverse of `encode_tree`. The input is not trusted.

    Args:
        text: As it came.
        peer: Who sent it, for the error.
        check_time: Called now and then.

    Raises:
        ManifestError: It has too many arrays, or they nest too deeply.
        DeadlineExceededError: ``check_time`` raised it.
        msgspec.MsgspecError: It is no tree.
        RecursionError: It nests more deeply than Python lets through.
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
    """How many there are; fewer than `MAX_ARRAYS` are counted quickly, with those that are only text."""
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
    """What is no text, in pieces, so that whoever looks at it needs little memory, and sees the time."""
    for piece in _PIECE.finditer(encoded):
        check_time()
        yield _STRING.sub(b"", piece.group())
