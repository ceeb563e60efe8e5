"""A `Delta` encodes the difference between two versions of weights: only the elements that changed.

Between two steps of reinforcement learning about 1 % of the bfloat16 elements change, all over the model, so that every
chunk differs. A delta contains the distance from each changed element to the next, and the changed bits of each
element. If 1 % of the elements change, a delta has 1.5 % of the size of the weights, or less if only low bits change. A
delta is lossless. Applying the same delta again restores the older version.

Format: the length of the header (8 bytes, little-endian), the header (msgpack), and zstandard frames with checksums
(RFC 8878). The header contains the lengths of the frames. The first frame has a byte for each distance; 255 stands for
a far distance. The second frame has the far distances, 8 bytes each. The third frame has byte 0 of the changed bits of
each element, the fourth frame has byte 1, and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ft_transport.errors import ManifestError
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.wire.chunks import digest

_FORMAT: Final = 1
_FAR: Final = 255
_BLOCK_BYTES: Final = 1 << 20
"""Number of bytes that are compared at a time, few enough for the cache of a core."""
_LEVEL: Final = 1
"""Compression level of zstandard. The distances are nearly random, so higher levels are slower and save nothing."""
_MAX_HEADER_BYTES: Final = 64 << 20
_MAX_SHARE: Final = 8
"""An uncompressed delta may be at most 1/8 of the weights, which bounds the publisher's memory. With more changes, a
delta would hardly be smaller than the changed chunks."""
_LENGTH_BYTES: Final = 8
_HEADER_COST: Final = 32
"""Assumed bytes of memory per byte of a decoded header; 16 were measured."""
_POSITION_BYTES: Final = 8
_WORD: Final = np.dtype("<u8")
_ITEM_BYTES: Final = (1, 2, 4, 8)

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[Any]


class DeltaTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the newer version, as described in the header of a delta.

    Attributes:
        name: Name of the tensor.
        num_bytes: Size of the tensor in bytes.
        item_bytes: Size of an element in bytes: 1, 2, 4 or 8.
        num_changed: Number of elements that differ from the older version.
        digest: Digest of the tensor's bytes (`ft_transport.wire.chunks.digest`).
    """

    name: str
    num_bytes: int
    item_bytes: int
    num_changed: int
    digest: int

    @property
    def num_items(self) -> int:
        """Number of elements of the tensor."""
        return self.num_bytes // self.item_bytes


class _Header(msgspec.Struct, frozen=True, array_like=True):
    format: int
    version: int
    base: int
    tensors: tuple[DeltaTensor, ...]
    num_far: int
    lengths: tuple[int, ...]


_header_decoder: Final = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The bytes of one tensor in both versions, row-major.

    Attributes:
        name: Name of the tensor.
        item_bytes: Size of an element in bytes: 1, 2, 4 or 8.
        base: Bytes of the tensor in the older version.
        new: Bytes of the tensor in the newer version; the same number of bytes as ``base``.
    """

    name: str
    item_bytes: int
    base: Bytes
    new: Bytes


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """The changed elements of one tensor.

    Attributes:
        tensor: The description of the tensor.
        positions: Positions of the changed elements, ascending, int64.
        bits: For each changed element, the XOR of old and new value, as an unsigned integer of the element's size.
    """

    tensor: DeltaTensor
    positions: npt.NDArray[np.int64]
    bits: Elements


@dataclass(frozen=True, slots=True)
class Delta:
    """A decoded delta with a valid header.

    Attributes:
        version: Number of the newer version.
        base: Number of the older version, to which the delta is applied.
        tensors: All tensors of the newer version.
        num_bytes: Size of the encoded delta in bytes.
        memory_bytes: Bytes of memory that the decoded delta and its `changes` take.
    """

    version: int
    base: int
    tensors: tuple[DeltaTensor, ...]
    num_bytes: int
    memory_bytes: int
    _near: Bytes
    _far: npt.NDArray[np.uint64]
    _planes: tuple[Bytes, ...]

    def changes(self) -> Iterator[TensorChanges]:
        """Yield the changes of each tensor that differs between the versions.

        Raises:
            ManifestError: A position is outside of its tensor.
        """
        start = far_start = 0
        plane_starts = [0] * len(self._planes)
        for tensor in self.tensors:
            if not tensor.num_changed:
                continue
            distances = self._near[start : start + tensor.num_changed].astype(np.int64)
            start += tensor.num_changed
            is_far = distances == _FAR
            num_far = int(np.count_nonzero(is_far))
            far = self._far[far_start : far_start + num_far]
            far_start += num_far
            if len(far) < num_far or (num_far and int(far.max()) >= tensor.num_items):
                raise ManifestError("expected distances within the tensor, got a longer one", path=tensor.name)
            distances[is_far] = far
            distances += 1
            positions = np.cumsum(distances) - 1
            # A sum that overflows becomes negative.
            if int(positions[-1]) >= tensor.num_items or int(positions.min()) < 0:
                raise ManifestError("expected changed elements within the tensor, got one outside", path=tensor.name)
            bits = np.zeros((tensor.num_changed, tensor.item_bytes), np.uint8)
            for at in range(tensor.item_bytes):
                begin = plane_starts[at]
                bits[:, at] = self._planes[at][begin : begin + tensor.num_changed]
                plane_starts[at] += tensor.num_changed
            yield TensorChanges(tensor, positions, bits.view(f"<u{tensor.item_bytes}").reshape(-1))


def encode_delta(version: int, base: int, pairs: Iterable[TensorPair], *, num_bytes: int | None = None) -> bytes | None:
    """Encode the delta between two versions.

    Args:
        version: Number of the newer version.
        base: Number of the older version, to which the delta is applied.
        pairs: All tensors in both versions. This function reads each pair before it requests the next one.
        num_bytes: Approximate number of bytes of the newer version; necessary if ``pairs`` is an iterator. Default: the
            sum over ``pairs``.

    Returns:
        The delta. ``None`` if it is not smaller than the blocks of 1 MiB that contain changes, or if its size before
        compression exceeds 1/8 of the weights.
    """
    tensors: list[DeltaTensor] = []
    near: list[Bytes] = []
    far: list[npt.NDArray[np.uint64]] = []
    planes: list[list[Bytes]] = [[] for _ in range(max(_ITEM_BYTES))]
    most = (sum(len(pair.new) for pair in pairs) if num_bytes is None else num_bytes) // _MAX_SHARE
    num_changed_bytes = num_encoded_bytes = 0
    for pair in pairs:
        found = _differences(pair, (most - num_encoded_bytes) // (1 + pair.item_bytes))
        if found is None:
            return None
        positions, bits, num_block_bytes = found
        num_changed_bytes += num_block_bytes
        tensors.append(DeltaTensor(pair.name, len(pair.new), pair.item_bytes, len(positions), digest(pair.new.data)))
        if not len(positions):
            continue
        distances = np.diff(positions, prepend=-1) - 1
        near.append(np.minimum(distances, _FAR).astype(np.uint8))
        far.append(distances[distances >= _FAR].astype(_WORD))
        of_bytes = bits.view(np.uint8).reshape(-1, pair.item_bytes)
        for at in range(pair.item_bytes):
            planes[at].append(np.ascontiguousarray(of_bytes[:, at]))
        num_encoded_bytes += len(positions) * (1 + pair.item_bytes)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    streams: list[list[Any]] = [near, far, *(plane for plane in planes if plane)]
    frames = [compressor.compress(np.concatenate(stream).data if stream else b"") for stream in streams]
    header = msgspec.msgpack.encode(
        _Header(_FORMAT, version, base, tuple(tensors), sum(map(len, far)), tuple(map(len, frames)))
    )
    encoded = b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, *frames))
    return encoded if len(encoded) < num_changed_bytes else None


def decode_delta(data: bytes | bytearray, *, max_bytes: int | None = None) -> Delta:
    """Decode and decompress a delta. The input is untrusted.

    Args:
        data: The encoded delta.
        max_bytes: Maximum memory of the decoded delta and its `changes`, in bytes. A delta that would take more is
            refused before it is decompressed. ``None``: no limit.

    Raises:
        ManifestError: The data is not a delta, is damaged, or would take too much memory.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    frames = view[_LENGTH_BYTES + length :]
    if len(view) < _LENGTH_BYTES or not 0 < length <= min(_MAX_HEADER_BYTES, len(view) - _LENGTH_BYTES):
        raise ManifestError(f"expected a delta, got {len(view)} bytes that do not begin with a header")
    if max_bytes is not None and length * _HEADER_COST > max_bytes:
        raise ManifestError(
            f"expected a delta that takes at most {max_bytes} bytes of memory, got a header of {length} bytes"
        )
    try:
        header = _header_decoder.decode(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except DECODE_ERRORS as error:
        raise ManifestError(f"expected the header of a delta: {error}") from error
    if header.format != _FORMAT:
        raise ManifestError(f"expected a delta of format {_FORMAT}, got {header.format}")
    for tensor in header.tensors:
        if tensor.item_bytes not in _ITEM_BYTES or not 0 <= tensor.num_changed <= tensor.num_items:
            raise ManifestError(f"expected at most one change per element, got {tensor!r:.200}", path=tensor.name)
    num_changed = sum(tensor.num_changed for tensor in header.tensors)
    if not 0 <= header.num_far <= num_changed:
        raise ManifestError(f"expected at most {num_changed} far distances, got {header.num_far}")
    if max_bytes is not None and (needed := _decoded_bytes(header.tensors, header.num_far)) > max_bytes:
        raise ManifestError(
            f"expected a delta that takes at most {max_bytes} bytes of memory, got one that takes {needed}"
        )
    sizes = [num_changed, header.num_far * _WORD.itemsize]
    for at in range(max(_ITEM_BYTES)):
        size = sum(tensor.num_changed for tensor in header.tensors if tensor.item_bytes > at)
        if size:
            sizes.append(size)
    if len(header.lengths) != len(sizes) or min(header.lengths) < 0 or sum(header.lengths) != len(frames):
        raise ManifestError(
            f"expected the lengths of {len(sizes)} frames with {len(frames)} bytes in all, got {header.lengths}"
        )
    starts = itertools.accumulate(header.lengths, initial=0)
    streams = [
        _decompressed(frames[start : start + length], size)
        for start, length, size in zip(starts, header.lengths, sizes, strict=False)
    ]
    return Delta(
        header.version,
        header.base,
        header.tensors,
        len(view),
        length * _HEADER_COST + _decoded_bytes(header.tensors, header.num_far),
        streams[0],
        streams[1].view(_WORD),
        tuple(streams[2:]),
    )


def apply_changes(changes: TensorChanges, target: Bytes) -> None:
    """Apply changes to a tensor in place.

    Args:
        changes: The changes of the tensor.
        target: All bytes of the tensor, contiguous and writable.
    """
    elements = target.view(changes.bits.dtype)
    elements[changes.positions] ^= changes.bits


def _decoded_bytes(tensors: Iterable[DeltaTensor], num_far: int) -> int:
    # Twice item_bytes: the changed bits exist in the decompressed frames and in the changes.
    of_changes = sum(each.num_changed * (1 + _POSITION_BYTES + 2 * each.item_bytes) for each in tensors)
    return of_changes + num_far * _WORD.itemsize


def _differences(pair: TensorPair, max_changed: int) -> tuple[npt.NDArray[np.int64], Elements, int] | None:
    """Return positions and XOR of the differing elements, and the total size of the 1 MiB blocks that contain them.

    Returns ``None`` as soon as more than ``max_changed`` elements differ.
    """
    if len(pair.base) != len(pair.new) or pair.item_bytes not in _ITEM_BYTES or len(pair.new) % pair.item_bytes:
        raise ValueError(f"expected two versions of equal size, with elements of 1, 2, 4 or 8 bytes, got {pair!r:.200}")
    kind = f"<u{pair.item_bytes}"
    per_word = _WORD.itemsize // pair.item_bytes
    in_words = len(pair.new) - len(pair.new) % _WORD.itemsize
    base, new = pair.base[:in_words].view(_WORD), pair.new[:in_words].view(_WORD)
    block = _BLOCK_BYTES // _WORD.itemsize
    both = np.empty(min(block, len(new)), _WORD)
    differs = np.empty(len(both), np.bool_)
    positions: list[npt.NDArray[np.int64]] = []
    bits: list[Elements] = []
    num_bytes = 0
    for start in range(0, len(new), block):
        size = min(block, len(new) - start)
        np.bitwise_xor(base[start : start + size], new[start : start + size], out=both[:size])
        np.not_equal(both[:size], 0, out=differs[:size])
        words = differs[:size].nonzero()[0]
        if len(words):
            elements = both[words].view(kind)
            at = elements.nonzero()[0]
            max_changed -= len(at)
            if max_changed < 0:
                return None
            positions.append((words[at // per_word] + start) * per_word + at % per_word)
            bits.append(elements[at])
            num_bytes += size * _WORD.itemsize
    tail = pair.base[in_words:].view(kind) ^ pair.new[in_words:].view(kind)
    at = tail.nonzero()[0]
    if len(at) > max_changed:
        return None
    positions.append(at + len(new) * per_word)
    bits.append(tail[at])
    return np.concatenate(positions), np.concatenate(bits), num_bytes + len(at) * pair.item_bytes


def _decompressed(frame: memoryview, size: int) -> Bytes:
    """Decompress a frame of known size. A frame that announces another size is refused before decompression."""
    try:
        announced = zstandard.frame_content_size(frame)
        if announced != size:
            raise ManifestError(f"expected a frame of {size} bytes in a delta, got {announced}")
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ManifestError(f"expected a zstandard frame in a delta: {error}") from error
    if len(data) != size:
        raise ManifestError(f"expected a frame of {size} bytes in a delta, got {len(data)}")
    return np.frombuffer(data, np.uint8)
