"""Slices: any box of a tensor as bytes of the data, and how several of them are asked for and answered.

A request (`SlicesRequest`) lists frames, each of which is some slices. The answer is the bytes of each frame, slice
after slice, and behind every frame its xxh3-64 digest, 8 bytes, big-endian. So a receiver verifies whatever part of a
tensor it needs, although the digests of a manifest are those of whole chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ft_transport.errors import ConfigurationError
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.runtime.garbage_collector import collector_paused
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.nodes import Count

FRAME_DIGEST_BYTES: Final = 8
MAX_REQUEST_BYTES: Final = 64 << 20
"""Most data that one request may ask for."""
MAX_REQUEST_BODY_BYTES: Final = 4 << 20
MAX_SLICES_PER_REQUEST: Final = 1 << 14
MAX_BLOCKS_PER_FRAME: Final = 1 << 18
"""Gathering so many takes about as long as copying and digesting a full frame."""

_MAX_LOOPS: Final = 31
"""numpy has 32 dimensions at most in its first major version."""

_Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**62)]
Loop: TypeAlias = tuple[Annotated[int, Meta(ge=2, le=2**62)], Count]
"""How often, and how many bytes further each time. More than once: the fewer bytes, the fewer loops."""


class Slice(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """``block_bytes`` at ``start``, repeated by each of ``loops``, of which the last is the innermost."""

    start: Count
    block_bytes: _Positive
    loops: Annotated[tuple[Loop, ...], Meta(max_length=_MAX_LOOPS)] = ()

    @property
    def num_bytes(self) -> int:
        """How many bytes it consists of."""
        num_bytes = self.block_bytes
        for count, _ in self.loops:
            num_bytes *= count
        return num_bytes

    @property
    def end(self) -> int:
        """Where its last byte ends."""
        return self.start + self.block_bytes + sum((count - 1) * stride for count, stride in self.loops)


SliceFrame: TypeAlias = tuple[Slice, ...]


class SlicesRequest(Struct, frozen=True):
    """The body of a request, as JSON."""

    frames: tuple[Annotated[SliceFrame, Meta(min_length=1)], ...]


_request_decoder = msgspec.json.Decoder(SlicesRequest)
_encoder = msgspec.json.Encoder()


def slice_of(
    start: int, strides_bytes: Sequence[int], origin: Sequence[int], counts: Sequence[int], item_bytes: int
) -> Slice:
    """A box of a tensor.

    Args:
        start: Where the tensor's first element lies.
        strides_bytes: From one element to the next, by dimension.
        origin: First index of the box, by dimension.
        counts: Its extent, by dimension; not empty.
        item_bytes: Size of an element.
    """
    block_bytes = item_bytes
    loops: list[Loop] = []
    for first, count, stride in zip(reversed(origin), reversed(counts), reversed(strides_bytes), strict=True):
        start += first * stride
        if count == 1:
            continue
        if not loops and stride == block_bytes:
            block_bytes *= count
        elif loops and loops[-1][0] * loops[-1][1] == stride:
            loops[-1] = (loops[-1][0] * count, loops[-1][1])
        else:
            loops.append((count, stride))
    return Slice(start, block_bytes, tuple(reversed(loops)))


def row_major_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Strides, in bytes, of a tensor whose elements lie one behind the other."""
    strides = []
    for size in reversed(shape):
        strides.append(item_bytes)
        item_bytes *= size
    return tuple(reversed(strides))


def joined(slices: Sequence[Slice]) -> SliceFrame:
    """The same bytes in the same order, what is adjacent as one slice."""
    joint: list[Slice] = []
    for piece in slices:
        last = joint[-1] if joint else None
        if last is not None and not last.loops and not piece.loops and last.end == piece.start:
            joint[-1] = Slice(last.start, last.block_bytes + piece.block_bytes)
        else:
            joint.append(piece)
    return tuple(joint)


def frame_context(snapshot_id: SnapshotId, frame: SliceFrame) -> bytes:
    """What the digest of a frame is about, so that with a key no frame can stand for another one."""
    return snapshot_id.encode() + _encoder.encode(frame)


def answer_bytes(frames: Sequence[SliceFrame]) -> int:
    """Length of the answer."""
    return sum(piece.num_bytes for frame in frames for piece in frame) + FRAME_DIGEST_BYTES * len(frames)


def encode_request(frames: Sequence[SliceFrame]) -> bytes:
    """The body of a request."""
    return _encoder.encode(SlicesRequest(tuple(frames)))


def decode_request(body: bytes, *, data_bytes: int) -> tuple[SliceFrame, ...]:
    """The frames that a request asks for. The input is not trusted.

    Args:
        body: What came.
        data_bytes: Length of the data, beyond which there is nothing to ask for.

    Raises:
        ConfigurationError: It is no request, asks for what there is not, or for too much at once.
    """
    try:
        with collector_paused():
            frames = _request_decoder.decode(body).frames
    except DECODE_ERRORS as error:
        raise ConfigurationError(f"expected a request for slices: {error}") from error
    num_slices = sum(map(len, frames))
    if num_slices > MAX_SLICES_PER_REQUEST:
        raise ConfigurationError(f"expected at most {MAX_SLICES_PER_REQUEST} slices in a request, got {num_slices}")
    # This runs on the server's event loop: each slice is looked at once, and the first that is too large is the last.
    num_asked = 0
    for frame in frames:
        num_bytes = num_blocks = 0
        for piece in frame:
            num_piece_bytes = piece.num_bytes
            num_bytes += num_piece_bytes
            num_blocks += num_piece_bytes // piece.block_bytes
            if num_bytes > CHUNK_BYTES:
                break
            if piece.end > data_bytes:
                raise ConfigurationError(f"expected slices of {data_bytes} bytes of data, got one up to {piece.end}")
        if not 0 < num_bytes <= CHUNK_BYTES:
            raise ConfigurationError(f"expected frames of 1 to {CHUNK_BYTES} bytes, got one of {num_bytes}")
        if num_blocks > MAX_BLOCKS_PER_FRAME:
            raise ConfigurationError(
                f"expected frames of at most {MAX_BLOCKS_PER_FRAME} blocks, got one of {num_blocks}"
            )
        num_asked += num_bytes
    if not 0 < num_asked <= MAX_REQUEST_BYTES:
        raise ConfigurationError(f"expected a request for 1 to {MAX_REQUEST_BYTES} bytes of data, got {num_asked}")
    return frames
