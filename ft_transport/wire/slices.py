"""Slices (each contains a box of a tensor: an index range in each dimension), and HTTP requests for slices.

A request (`SlicesRequest`) lists frames, and each frame is a list of slices. For each frame, the response has the bytes
of the slices, one after the other, and then the frame's digest: 8 bytes, big-endian. So a receiver can verify any part
of a tensor, although the digests in the manifest are those of whole chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ft_transport.errors import ConfigurationError
from ft_transport.runtime.decoding import DECODE_ERRORS, collector_paused
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.nodes import Count

FRAME_DIGEST_BYTES: Final = 8
MAX_REQUEST_BYTES: Final = 64 << 20
"""Maximum number of bytes of data that one request may ask for."""
MAX_REQUEST_BODY_BYTES: Final = 4 << 20
MAX_SLICES_PER_REQUEST: Final = 1 << 14
MAX_BLOCKS_PER_FRAME: Final = 1 << 18
"""Maximum number of contiguous pieces in a frame: collecting them takes about as long as digesting a full frame."""

_MAX_LOOPS: Final = 31
"""Arrays of numpy 1 have at most 32 dimensions: the loops and the block."""

_Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**62)]
Loop: TypeAlias = tuple[Annotated[int, Meta(ge=2, le=2**62)], Count]
"""Number of repetitions (at least 2), and their distance in bytes."""


class Slice(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Bytes of the data: a block of ``block_bytes`` at ``start``, repeated by nested ``loops``, outermost first."""

    start: Count
    block_bytes: _Positive
    loops: Annotated[tuple[Loop, ...], Meta(max_length=_MAX_LOOPS)] = ()

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the slice."""
        num_bytes = self.block_bytes
        for count, _ in self.loops:
            num_bytes *= count
        return num_bytes

    @property
    def end(self) -> int:
        """Position after the last byte of the slice."""
        return self.start + self.block_bytes + sum((count - 1) * stride for count, stride in self.loops)


SliceFrame: TypeAlias = tuple[Slice, ...]


class SlicesRequest(Struct, frozen=True):
    """The JSON body of a request for slices."""

    frames: tuple[Annotated[SliceFrame, Meta(min_length=1)], ...]


_request_decoder = msgspec.json.Decoder(SlicesRequest)
_encoder = msgspec.json.Encoder()


def slice_of(
    start: int, strides_bytes: Sequence[int], origin: Sequence[int], counts: Sequence[int], item_bytes: int
) -> Slice:
    """Return the slice with the elements of a box of a tensor.

    Args:
        start: Position of the tensor's first element in the data.
        strides_bytes: Strides of the tensor in bytes.
        origin: First index of the box in each dimension.
        counts: Shape of the box. No size may be 0.
        item_bytes: Size of an element in bytes.
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
    """Return the strides, in bytes, of a contiguous tensor of shape ``shape``."""
    strides = []
    for size in reversed(shape):
        strides.append(item_bytes)
        item_bytes *= size
    return tuple(reversed(strides))


def joined(slices: Sequence[Slice]) -> SliceFrame:
    """Join slices that follow each other in the data, so that a frame has the same bytes in fewer slices."""
    joint: list[Slice] = []
    for piece in slices:
        last = joint[-1] if joint else None
        if last is not None and not last.loops and not piece.loops and last.end == piece.start:
            joint[-1] = Slice(last.start, last.block_bytes + piece.block_bytes)
        else:
            joint.append(piece)
    return tuple(joint)


def frame_context(snapshot_id: SnapshotId, frame: SliceFrame) -> bytes:
    """Return the context for the keyed digest of a frame, which makes the digest valid for this frame alone."""
    return snapshot_id.encode() + _encoder.encode(frame)


def answer_bytes(frames: Sequence[SliceFrame]) -> int:
    """Return the length of the response to a request for frames."""
    return sum(piece.num_bytes for frame in frames for piece in frame) + FRAME_DIGEST_BYTES * len(frames)


def encode_request(frames: Sequence[SliceFrame]) -> bytes:
    """Encode the body of a request for frames."""
    return _encoder.encode(SlicesRequest(tuple(frames)))


def decode_request(body: bytes, *, data_bytes: int) -> tuple[SliceFrame, ...]:
    """Decode and check the body of a request for frames. The input is untrusted.

    Args:
        body: The received body.
        data_bytes: Length of the snapshot's data.

    Raises:
        ConfigurationError: The body is invalid, a slice ends after the data, or the request exceeds a limit.
    """
    try:
        with collector_paused():
            frames = _request_decoder.decode(body).frames
    except DECODE_ERRORS as error:
        raise ConfigurationError(f"expected a request for slices: {error}") from error
    num_slices = sum(map(len, frames))
    if num_slices > MAX_SLICES_PER_REQUEST:
        raise ConfigurationError(f"expected at most {MAX_SLICES_PER_REQUEST} slices in a request, got {num_slices}")
    # This runs on the server's event loop, so it reads each slice once, and stops at the first that is too large.
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
                raise ConfigurationError(
                    f"expected slices of {data_bytes} bytes of data, got one up to byte {piece.end}"
                )
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


class Box(NamedTuple):
    """A box of a tensor that the receiver needs and one or more sources have.

    Attributes:
        holders: The sources that have the box, as positions in ``Wanted.sources``.
        held_shape: Shape of the part of the tensor that each of these sources has.
        held_origin: First index of the box in the source's part, by dimension.
        origin: First index of the box in the receiver's part, by dimension.
        counts: Shape of the box.
    """

    holders: tuple[int, ...]
    held_shape: tuple[int, ...]
    held_origin: tuple[int, ...]
    origin: tuple[int, ...]
    counts: tuple[int, ...]


def in_pieces(box: Box, item_bytes: int) -> Iterable[Box]:
    """Divide a box into pieces that fit into a frame; into smaller pieces if several sources can share the work."""
    piece_bytes = CHUNK_BYTES if len(box.holders) == 1 else CHUNK_BYTES // 2
    # A frame with many short rows may have fewer bytes, because each row costs time.
    piece_bytes = min(piece_bytes, block_items(box) * item_bytes * MAX_BLOCKS_PER_FRAME)
    if math.prod(box.counts) * item_bytes <= piece_bytes:
        return (box,)
    return _cut_to(box, item_bytes, piece_bytes)


def block_items(box: Box) -> int:
    """Return the number of elements of a box that are contiguous in the row-major memory of a source."""
    num_items = 1
    for count, size in zip(reversed(box.counts), reversed(box.held_shape), strict=True):
        num_items *= count
        if count != size:
            break
    return num_items


def _cut_to(box: Box, item_bytes: int, piece_bytes: int) -> Iterator[Box]:
    """Divide a box along its first dimensions into pieces of at most ``piece_bytes``."""
    if math.prod(box.counts) * item_bytes <= piece_bytes:
        yield box
        return
    dim = next(dim for dim, count in enumerate(box.counts) if count > 1)
    inner_bytes = math.prod(box.counts[dim + 1 :]) * item_bytes
    step = max(1, piece_bytes // inner_bytes)
    for first in range(0, box.counts[dim], step):
        piece = box._replace(
            held_origin=_moved(box.held_origin, dim, first),
            origin=_moved(box.origin, dim, first),
            counts=(*box.counts[:dim], min(step, box.counts[dim] - first), *box.counts[dim + 1 :]),
        )
        yield from _cut_to(piece, item_bytes, piece_bytes)


def _moved(origin: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*origin[:dim], origin[dim] + by, *origin[dim + 1 :])
