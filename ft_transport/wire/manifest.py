"""The `Manifest` of a snapshot, and its encoding as a safetensors header with further information in ``__metadata__``.

A snapshot is one safetensors file, ``[8-byte little-endian header length][JSON header][tensor bytes]``
(https://huggingface.co/docs/safetensors, section "Format"). The header maps each tensor name to the tensor's dtype,
shape and byte range. ``__metadata__`` maps strings to strings. It has the step, the snapshot's id, the tree of the
state (``wire.nodes``) and one digest per chunk. Every safetensors reader can open the file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Final, NewType

import msgspec
from msgspec import Meta, Raw, Struct

from ft_transport.errors import ManifestError
from ft_transport.runtime.decoding import DECODE_ERRORS, collector_paused
from ft_transport.wire.chunks import DIGEST_HEX_DIGITS, PLAIN, ChunkTable, Digester
from ft_transport.wire.layouts import Layout, LayoutTable, Mesh, check
from ft_transport.wire.nodes import STRIDE, CheckTime, Count, Dimensions, Node, decode_tree, encode_tree, unbounded
from ft_transport.wire.signing import Key

SnapshotId = NewType("SnapshotId", str)
"""Unique id of a snapshot: 32 random hexadecimal digits."""

ContentId = NewType("ContentId", str)
"""Id of the content of a snapshot: 32 hexadecimal digits, equal on all replicas with the same state."""

FORMAT_VERSION: Final = 2
MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header that the safetensors library accepts (``MAX_HEADER_SIZE`` in its ``tensor.rs``)."""

DATA_ALIGN_BYTES: Final = 4096
"""The data starts at a multiple of the page size, so that the kernel can send whole pages."""

MAX_ITEMS: Final = 2**48
"""Maximum product of the nonzero sizes of an empty tensor, so that torch can compute its strides in 64 bits."""

ITEM_BITS: Final[dict[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
"""Bits per element of each safetensors dtype that this package writes."""

SAFETENSORS_NAMES: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""The torch dtypes that every safetensors reader supports. Others are stored as ``U8``; the tree has their name."""

SAFETENSORS_FILE_NAMES: Final = SAFETENSORS_NAMES | {
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}
"""The torch dtypes that safetensors 0.8 has names for. Shapes in its files count ``F4`` in half bytes."""

TORCH_NAMES: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
"""torch's name of each dtype in `SAFETENSORS_NAMES`."""

_PREFIX: Final = "ft_transport."
_RESERVED_NAME: Final = "__metadata__"
_LATER: Final = "later"
_CONTENT_ID_BYTES: Final = 16


class TensorEntry(Struct, frozen=True, gc=False):
    """A tensor of the manifest: safetensors name and dtype, shape, and half-open byte range in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a snapshot, without the bytes of its tensors.

    Attributes:
        step: The committed step of the state.
        snapshot_id: Id of the snapshot. Snapshots of the same step have different ids.
        tensors: The tensor table, in the order of the tree. The data is in the order of ``TensorEntry.start``.
        tree: The nested state, in which tensors are indices into the tensor table.
        meshes: The device meshes of the sender.
        layouts: The layouts of DTensors, to which nodes of the tree refer by index.
        chunks: The division of the data into chunks.
        digests: The digest of each chunk, in order; ``None`` if the sender computes the digests while it sends the
            data. Then the receiver requests them later.
        header_bytes: Length of the file before the data: 8 bytes, and the JSON header with padding.
        digester: Computes digests of the same kind as ``digests``.
    """

    step: int
    snapshot_id: SnapshotId
    tensors: tuple[TensorEntry, ...]
    tree: Node
    meshes: tuple[Mesh, ...] = ()
    layouts: tuple[Layout, ...] = ()
    chunks: ChunkTable
    digests: tuple[int, ...] | None
    header_bytes: int
    digester: Digester = PLAIN

    @property
    def data_bytes(self) -> int:
        """Length of the tensor data."""
        return self.chunks.data_bytes

    @property
    def total_bytes(self) -> int:
        """Length of the whole safetensors file."""
        return self.header_bytes + self.data_bytes

    def header(self, digests: Sequence[int]) -> bytes:
        """Return the bytes of the safetensors file before the data, with ``digests`` in the header."""
        return encode_header(
            step=self.step,
            snapshot_id=self.snapshot_id,
            tensors=list(self.tensors),
            tree=self.tree,
            chunks=self.chunks,
            digests=list(digests),
            align_bytes=DATA_ALIGN_BYTES,
            layouts=LayoutTable(list(self.meshes), list(self.layouts)),
            digester=self.digester,
        )


class _HeaderEntry(Struct, frozen=True, gc=False):
    dtype: str
    shape: Dimensions
    data_offsets: tuple[Count, Count]


_entry_decoder = msgspec.json.Decoder(_HeaderEntry)
_header_decoder = msgspec.json.Decoder(dict[str, Raw])
_metadata_decoder = msgspec.json.Decoder(dict[str, str])
_meshes_decoder = msgspec.json.Decoder(tuple[Mesh, ...])
_layouts_decoder = msgspec.json.Decoder(tuple[Layout, ...])
_count_decoder = msgspec.json.Decoder(Count)
_chunk_bytes_decoder = msgspec.json.Decoder(Annotated[int, Meta(ge=1, le=2**40)])
_encoder = msgspec.json.Encoder()


def encode_header(
    *,
    step: int,
    snapshot_id: SnapshotId,
    tensors: list[TensorEntry],
    tree: Node,
    chunks: ChunkTable,
    digests: list[int] | None,
    align_bytes: int,
    layouts: LayoutTable | None = None,
    digester: Digester = PLAIN,
) -> bytes:
    """Encode the bytes of a snapshot's file before the data: length prefix, JSON header, padding of spaces.

    Args:
        step: The committed step.
        snapshot_id: Id of the snapshot.
        tensors: The tensor table. Sorted by ``start``, the byte ranges must cover the data from 0 without gaps.
        tree: The nested state.
        chunks: The division of the data into chunks.
        digests: The digest of each chunk; ``None`` if receivers request the digests later.
        align_bytes: The length of the result is a multiple of this number.
        layouts: The layouts to which the tree refers.
        digester: Computes digests of the same kind as ``digests``.

    Raises:
        ManifestError: The header would be longer than safetensors readers accept.
    """
    metadata = {
        _PREFIX + "format": str(FORMAT_VERSION),
        _PREFIX + "step": str(step),
        _PREFIX + "snapshot": snapshot_id,
        _PREFIX + "chunk_bytes": str(chunks.chunk_bytes),
        _PREFIX + "digests": _LATER if digests is None else encode_digests(digests),
        _PREFIX + "tree": encode_tree(tree, step=step),
        _PREFIX + "meshes": _encoder.encode(layouts.meshes if layouts is not None else []).decode(),
        _PREFIX + "layouts": _encoder.encode(layouts.layouts if layouts is not None else []).decode(),
    }
    if digester.is_keyed:
        metadata[_PREFIX + "digest"] = digester.name
    header: dict[str, object] = {_RESERVED_NAME: metadata}
    for entry in tensors:
        header[entry.name] = _HeaderEntry(entry.dtype, entry.shape, (entry.start, entry.end))
    encoded = _encoder.encode(header)
    padded_bytes = -(-(8 + len(encoded)) // align_bytes) * align_bytes - 8
    if padded_bytes > MAX_HEADER_BYTES:
        raise ManifestError(
            f"expected a manifest of at most {MAX_HEADER_BYTES} bytes, the limit of safetensors readers, got "
            f"{padded_bytes} for {len(tensors)} tensors",
            step=step,
        )
    return padded_bytes.to_bytes(8, "little") + encoded.ljust(padded_bytes)


def decode_header(
    encoded: bytes | memoryview,
    *,
    keys: Sequence[Key] = (),
    peer: str | None = None,
    check_time: CheckTime = unbounded,
) -> Manifest:
    """Decode and check a JSON header, without the length prefix, that a peer has sent.

    The input is untrusted. The result is always a consistent manifest, and the memory of the decoder is at most
    proportional to the input.

    Args:
        encoded: The received header, including padding.
        keys: Keys of the job. If there are any, plain digests are refused.
        peer: Name of the sender, for errors.
        check_time: Called repeatedly; raises an error after a deadline.

    Raises:
        ManifestError: The header is malformed, inconsistent, of another format, or too long.
        DeadlineExceededError: ``check_time`` raised the error.
    """
    if len(encoded) > MAX_HEADER_BYTES:
        raise ManifestError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(encoded)}", peer=peer)
    try:
        with collector_paused():
            header = _header_decoder.decode(encoded)
        raw_metadata = header.pop(_RESERVED_NAME, None)
        if raw_metadata is None:
            raise ManifestError("expected a snapshot, got a safetensors header without __metadata__", peer=peer)
        metadata = _metadata_decoder.decode(raw_metadata)
        version = _count_decoder.decode(_required(metadata, "format", peer))
        if version != FORMAT_VERSION:
            raise ManifestError(f"expected snapshot format {FORMAT_VERSION}, got {version}", peer=peer)
        check_time()
        tensors = _decode_table(header, peer, check_time)
        chunks = ChunkTable(
            data_bytes=max((tensor.end for tensor in tensors), default=0),
            chunk_bytes=_chunk_bytes_decoder.decode(_required(metadata, "chunk_bytes", peer)),
        )
        _check_number_of(chunks, peer)
        digests = _required(metadata, "digests", peer)
        meshes = _meshes_decoder.decode(_required(metadata, "meshes", peer))
        layouts = _layouts_decoder.decode(_required(metadata, "layouts", peer))
        check(meshes, layouts, peer=peer)
        check_time()
        return Manifest(
            step=_count_decoder.decode(_required(metadata, "step", peer)),
            snapshot_id=_decode_snapshot_id(_required(metadata, "snapshot", peer), peer),
            tensors=tensors,
            tree=decode_tree(_required(metadata, "tree", peer), peer=peer, check_time=check_time),
            meshes=meshes,
            layouts=layouts,
            chunks=chunks,
            digests=None if digests == _LATER else decode_digests(digests, chunks.num_chunks, peer=peer),
            header_bytes=8 + len(encoded),
            digester=_digester(metadata.get(_PREFIX + "digest", PLAIN.name), keys, peer),
        )
    except DECODE_ERRORS as error:
        raise ManifestError(f"expected the header of a snapshot: {error}", peer=peer) from error


def _digester(name: str, keys: Sequence[Key], peer: str | None) -> Digester:
    found = Digester.named(name, keys)
    if found is None:
        expected = (
            "digests made with the key of the job token" if keys else f"{PLAIN.name} digests, without a job token"
        )
        raise ManifestError(f"expected {expected}, got {name[:64]!r}", peer=peer)
    return found


def _required(metadata: dict[str, str], key: str, peer: str | None) -> str:
    try:
        return metadata[_PREFIX + key]
    except KeyError:
        raise ManifestError(f"expected {_PREFIX + key!r} in the snapshot's metadata, got none", peer=peer) from None


def _check_number_of(chunks: ChunkTable, peer: str | None) -> None:
    """Refuse a chunk table whose digests would not fit into a header, even if the digests are sent later."""
    num_bytes = chunks.num_chunks * DIGEST_HEX_DIGITS
    if num_bytes > MAX_HEADER_BYTES:
        raise ManifestError(f"expected digests of at most {MAX_HEADER_BYTES} bytes in all, got {num_bytes}", peer=peer)


def _decode_snapshot_id(text: str, peer: str | None) -> SnapshotId:
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise ManifestError(f"expected a snapshot id of 32 hexadecimal digits, got {text[:64]!r}", peer=peer)
    return SnapshotId(text)


def encode_digests(digests: Sequence[int]) -> str:
    """Encode digests as one string of hexadecimal digits, `DIGEST_HEX_DIGITS` for each digest."""
    return "".join(f"{digest:0{DIGEST_HEX_DIGITS}x}" for digest in digests)


def decode_digests(text: str, num_chunks: int, *, peer: str | None) -> tuple[int, ...]:
    """Decode the result of `encode_digests`.

    Args:
        text: The received text.
        num_chunks: The expected number of digests.
        peer: Name of the sender, for errors.

    Raises:
        ManifestError: The text does not consist of ``num_chunks`` digests.
    """
    if len(text) != num_chunks * DIGEST_HEX_DIGITS:
        raise ManifestError(
            f"expected {num_chunks} digests of {DIGEST_HEX_DIGITS} digits, got {len(text)} characters", peer=peer
        )
    try:
        packed = bytes.fromhex(text)
    except ValueError as error:
        raise ManifestError(f"expected hexadecimal digests: {error}", peer=peer) from error
    # fromhex skips white space, which would leave too few bytes.
    if len(packed) * 2 != len(text):
        raise ManifestError("expected hexadecimal digests, got white space between them", peer=peer)
    width = DIGEST_HEX_DIGITS // 2
    return tuple(int.from_bytes(packed[at : at + width], "big") for at in range(0, len(packed), width))


def _decode_table(header: dict[str, Raw], peer: str | None, check_time: CheckTime) -> tuple[TensorEntry, ...]:
    tensors = []
    for num_before, (name, raw) in enumerate(header.items()):
        if num_before % STRIDE == 0:
            check_time()
        entry = _entry_decoder.decode(raw)
        tensors.append(TensorEntry(name, entry.dtype, entry.shape, *entry.data_offsets))
    expected_start = 0
    for tensor in sorted(tensors, key=attrgetter("start", "end")):
        bits = ITEM_BITS.get(tensor.dtype)
        if bits is None:
            raise ManifestError(f"expected a known dtype, got {tensor.dtype[:64]!r}", peer=peer, path=tensor.name)
        num_items = math.prod(tensor.shape)
        if not num_items and math.prod(size for size in tensor.shape if size) > MAX_ITEMS:
            raise ManifestError(
                f"expected nonzero sizes with a product of at most {MAX_ITEMS}, got {list(tensor.shape)}",
                peer=peer,
                path=tensor.name,
            )
        expected_end = expected_start + num_items * bits // 8
        if tensor.start != expected_start or tensor.end != expected_end:
            raise ManifestError(
                f"expected bytes [{expected_start}, {expected_end}) for {tensor.dtype}{list(tensor.shape)}, got "
                f"[{tensor.start}, {tensor.end})",
                peer=peer,
                path=tensor.name,
            )
        expected_start = expected_end
    return tuple(tensors)


def content_id(manifest: Manifest) -> ContentId:
    """Return a hash of a manifest's step, tensors, tree, layouts, chunks and digests; the snapshot id is left out.

    Receivers of the same content find each other's relays by this hash. The hash proves nothing: a receiver compares
    all data with the digests of its manifest.

    Raises:
        ManifestError: The manifest has no digests yet.
    """
    if manifest.digests is None:
        raise ManifestError("expected a manifest with digests, got one without them", step=manifest.step)
    hasher = hashlib.blake2b(digest_size=_CONTENT_ID_BYTES)
    parts = (
        str(manifest.step).encode(),
        msgspec.json.encode(manifest.tensors),
        encode_tree(manifest.tree, step=manifest.step).encode(),
        msgspec.json.encode(manifest.meshes),
        msgspec.json.encode(manifest.layouts),
        str(manifest.chunks.chunk_bytes).encode(),
        manifest.digester.name.encode(),
        encode_digests(manifest.digests).encode(),
    )
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return ContentId(hasher.hexdigest())


def parse_content_id(text: str) -> ContentId | None:
    """Return a text from a peer as a content id; ``None`` if it has another format."""
    if len(text) != 2 * _CONTENT_ID_BYTES or not set(text) <= set("0123456789abcdef"):
        return None
    return ContentId(text)
