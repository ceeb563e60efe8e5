"""Compares states bit for bit: two states by their digests, or a live state with the manifest of a snapshot.

After a receiver has called its load functions, its state may differ from the received one: a function may skip, convert
or reorder values. `find_differences` detects that: it computes the digests of the manifest's chunks from the live
tensors. It reads each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final

import msgspec
import torch

from ft_transport.runtime.decoding import collector_paused
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.state.blocks import FlatState
from ft_transport.state.bounce_buffers import HALF_BYTES, BounceBuffers, padded_bytes
from ft_transport.state.copying import Accelerator, mark
from ft_transport.state.flatten import flatten
from ft_transport.state.restore import DestinationPlan, Piece
from ft_transport.state.tensors import as_bytes, bytes_at, carrier_of, torch_name_of
from ft_transport.wire.chunks import Hasher
from ft_transport.wire.layouts import Layout
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import DefaultDictNode, LayoutNode, MappingNode, TensorNode


def state_digest(state: object) -> int:
    """Return the xxh3-64 digest of a state: of every bit of its tensors and leaves, and of types, paths and shapes.

    Two states have the same digest if the snapshot of one restores to the other. Of a DTensor, the digest covers the
    local shard and its layout. Device tensors are copied to the host, one at a time.

    Args:
        state: Any nesting of supported kinds. It must not change during the call.

    Returns:
        An unsigned 64-bit number.

    Raises:
        UnsupportedLeafError: A leaf has no safe encoding.
    """
    flat = flatten(state)
    hasher = Hasher()
    hasher.update(msgspec.json.encode(flat.tree))
    blocks = flat.blocks
    for name, dtype, shape, source in zip(blocks.names, blocks.dtypes, blocks.shapes, blocks.sources, strict=True):
        hasher.update(f"{name}\0{dtype}\0{tuple(shape)}\0".encode())
        _update(hasher, source)
    return hasher.intdigest()


class TensorDigests:
    """Selects tensors of a state now, and computes their digests later, on any thread.

    Args:
        state: Any nesting of supported kinds, which is flattened on the calling thread.
        chosen: Returns whether to digest a tensor. The chosen tensors must not change until `compute` has returned.

    Raises:
        SnapshotError: The state cannot be flattened.
    """

    def __init__(self, state: object, chosen: Callable[[torch.Tensor], bool]) -> None:
        blocks = flatten(state).blocks
        self._chosen = [
            (f"{name} {dtype}{list(shape)}", source)
            for name, dtype, shape, source in zip(
                blocks.names, blocks.dtypes, blocks.shapes, blocks.sources, strict=True
            )
            if chosen(source)
        ]
        # `compute` waits for these events: then all work that is queued on the devices now has finished.
        devices = {source.device for _, source in self._chosen if not source.is_cpu}
        self._marks = mark(Accelerator(), devices)

    def compute(self) -> dict[str, int]:
        """Return the xxh3-64 digest of each selected tensor, by a text with its path, dtype and shape. Called once.

        Not on the main thread, where a signal handler may interrupt the copies from devices.
        """
        for event in self._marks.values():
            event.synchronize()
        chosen, self._chosen = self._chosen, []
        hashers = [Hasher() for _ in chosen]
        on_device: dict[int, torch.Tensor] = {}
        for number, (_, source) in enumerate(chosen):
            if source.is_cpu:
                _update(hashers[number], source)
            else:
                on_device[number] = _flat(source)
        accelerator = Accelerator()
        after = mark(accelerator, {source.device for source in on_device.values()})
        batches = list(_batches(on_device))
        pieces = ([on_device[number][start:end] for number, start, end in batch] for batch in batches)
        for batch, views in zip(batches, BounceBuffers(accelerator).read(pieces, after), strict=True):
            for (number, _, _), view in zip(batch, views, strict=True):
                hashers[number].update(view.numpy().data)
        return {name: hasher.intdigest() for (name, _), hasher in zip(chosen, hashers, strict=True)}


def _batches(tensors: Mapping[int, torch.Tensor]) -> Iterator[list[tuple[int, int, int]]]:
    """Divide tensors into batches that fit into a buffer. Yield each as number, start and end of the tensors' parts."""
    batch: list[tuple[int, int, int]] = []
    left = HALF_BYTES
    for number, tensor in tensors.items():
        start = 0
        while start < tensor.numel():
            if not left:
                yield batch
                batch, left = [], HALF_BYTES
            end = min(tensor.numel(), start + left)
            batch.append((number, start, end))
            left -= padded_bytes(end - start)
            start = end
    if batch:
        yield batch


def _update(hasher: Hasher, source: torch.Tensor) -> None:
    if source.nbytes:
        host = source.detach().view(carrier_of(source.dtype)).cpu().contiguous()
        hasher.update(as_bytes(host).numpy().data)


_ENDS: Final = ".[]"
_Tagged = msgspec.Struct
_MAPPINGS: Final = (MappingNode, DefaultDictNode)


def find_differences(manifest: Manifest, state: object, *, num_threads: int) -> tuple[str, ...]:
    """Return the differences between ``state`` and the state that ``manifest`` describes.

    Args:
        manifest: The manifest of the expected state, with digests.
        state: The live state, which must not change during the call. The order of keys in mappings does not matter.
        num_threads: Number of threads that read the tensors.

    Returns:
        One text for each difference, with its path; empty if the states are equal. If the bytes of a chunk differ, the
        text names all tensors in that chunk.

    Raises:
        UnsupportedLeafError: A leaf of ``state`` has no safe encoding.
    """
    with collector_paused():
        flat = flatten(state)
        walk = _Walk(manifest, flat)
        walk.compare("", manifest.tree, flat.tree)
    if walk.differences:
        return tuple(walk.differences)
    return tuple(_differing_tensors(manifest, flat, walk.counterparts, num_threads))


class _Walk:
    """Compares an expected tree with that of a live state, and pairs the tensors at the same paths."""

    def __init__(self, manifest: Manifest, flat: FlatState) -> None:
        self._manifest = manifest
        self._blocks = flat.blocks
        self._layouts = flat.layouts
        self.counterparts: dict[int, int] = {}
        self.differences: list[str] = []

    def compare(self, path: str, expected: object, actual: object) -> None:
        if isinstance(expected, _MAPPINGS) and isinstance(actual, _MAPPINGS):
            self._compare_mappings(path, expected, actual)
        elif isinstance(expected, (TensorNode, LayoutNode)) and isinstance(actual, (TensorNode, LayoutNode)):
            self._compare_tensors(path, expected, actual)
        elif isinstance(expected, _Tagged) and type(expected) is type(actual):
            for name in expected.__struct_fields__:
                ours, theirs = getattr(actual, name), getattr(expected, name)
                if name == "index":
                    self._pair(path, theirs, ours)
                elif name == "layout":
                    self._compare_layouts(path, theirs, ours)
                else:
                    self.compare(path, theirs, ours)
        elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
            if len(expected) != len(actual):
                self._note(path, f"{len(expected)} items", f"{len(actual)}")
            for position, (theirs, ours) in enumerate(zip(expected, actual, strict=False)):
                self.compare(f"{path}[{position}]", theirs, ours)
        # The types as well, because True == 1. (A nan is encoded as a node with its bits.)
        elif type(expected) is not type(actual) or expected != actual:
            self._note(path, _shown(expected), _shown(actual))

    def _compare_mappings(
        self, path: str, expected: MappingNode | DefaultDictNode, actual: MappingNode | DefaultDictNode
    ) -> None:
        if _kind(expected) != _kind(actual):
            self._note(path, _kind(expected), _kind(actual))
        theirs, ours = _by_key(expected), _by_key(actual)
        if theirs.keys() != ours.keys():
            missing = sorted(label for key, (label, _) in theirs.items() if key not in ours)
            unexpected = sorted(label for key, (label, _) in ours.items() if key not in theirs)
            self._note(path, "the same keys", f"missing keys {_shown(missing)} and further keys {_shown(unexpected)}")
        for key, (label, value) in theirs.items():
            if key in ours:
                self.compare(f"{path}.{label}".lstrip(_ENDS), value, ours[key][1])

    def _compare_tensors(self, path: str, expected: TensorNode | LayoutNode, actual: TensorNode | LayoutNode) -> None:
        """Compare dtype and shape, but not strides: the bytes in a snapshot are always in row-major order."""
        entry, own = self._manifest.tensors[expected.index], actual.index
        theirs = _meaning(expected, entry.dtype, entry.shape)
        ours = _meaning(actual, self._blocks.dtypes[own], self._blocks.shapes[own])
        if theirs == ours:
            self._pair(path, expected.index, own)
        else:
            self._note(path, *(f"{dtype}{list(shape)}" for dtype, shape in (theirs, ours)))

    def _pair(self, path: str, theirs: int, ours: int) -> None:
        if self.counterparts.setdefault(theirs, ours) != ours:
            self._note(path, "a tensor that shares memory with another one", "a tensor that does not")
            return
        entry, blocks = self._manifest.tensors[theirs], self._blocks
        own = (blocks.dtypes[ours], tuple(blocks.shapes[ours]))
        if (entry.dtype, tuple(entry.shape)) != own:
            self._note(entry.name, f"{entry.dtype}{list(entry.shape)}", f"{own[0]}{list(own[1])}")

    def _compare_layouts(self, path: str, theirs: int, ours: int) -> None:
        expected, actual = self._manifest.layouts[theirs], self._layouts.layouts[ours]
        where = (self._manifest.meshes[expected.mesh].shape, self._layouts.meshes[actual.mesh].shape)
        self.compare(path, [where[0], *_part(expected)], [where[1], *_part(actual)])

    def _note(self, path: str, expected: str, actual: str) -> None:
        self.differences.append(f"{path or 'the state'}: expected {expected}, got {actual}")


def _meaning(node: TensorNode | LayoutNode, dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the torch dtype and shape of a tensor. ``dtype`` and ``shape`` are those in the tensor table."""
    return (node.dtype, tuple(node.shape)) if isinstance(node, LayoutNode) else (torch_name_of(dtype), tuple(shape))


def _part(layout: Layout) -> list[object]:
    """Return the fields of a layout that are equal on ranks with the same shard. Mesh coordinates may differ."""
    return [layout.placements, layout.global_shape, layout.local_offset]


def _kind(node: MappingNode | DefaultDictNode) -> str:
    kind = node.kind if isinstance(node, MappingNode) else f"default {node.factory}"
    return f"a mapping of the kind {kind!r}"


def _by_key(node: MappingNode | DefaultDictNode) -> dict[str, tuple[str, object]]:
    """Return label and value of each item of a mapping, by the ``repr`` of its key, so that 1, True and "1" differ."""
    pairs = zip(node.items[::2], node.items[1::2], strict=True)
    return {repr(key): (key if isinstance(key, str) else repr(key), value) for key, value in pairs}


def _shown(value: object) -> str:
    return repr(value)[:100]


def _differing_tensors(
    manifest: Manifest, flat: FlatState, counterparts: dict[int, int], num_threads: int
) -> Iterator[str]:
    """Yield one text for each chunk whose digest, computed from the live tensors, differs from that in the manifest."""
    order = sorted(counterparts, key=lambda index: manifest.tensors[index].start)
    filled = [index for index in order if manifest.tensors[index].end > manifest.tensors[index].start]
    plan = DestinationPlan([manifest.tensors[index].start for index in filled], manifest.data_bytes)
    blocks = flat.blocks
    addresses = [blocks.addresses[counterparts[index]] for index in filled]
    # A tensor costs 30 µs, a view of memory 1 µs.
    copies = {
        slot: _flat(blocks.sources[counterparts[index]]) for slot, index in enumerate(filled) if not addresses[slot]
    }
    on_device = {slot: source for slot, source in copies.items() if not source.is_cpu}
    accelerator = Accelerator()
    after = mark(accelerator, {source.device for source in on_device.values()})
    digests = manifest.digests
    assert digests is not None, "a receiver of the data has requested the digests"

    every: tuple[Sequence[int], list[Piece]] = (range(manifest.chunks.num_chunks), [])

    def pieces_of(chunk: int) -> Iterator[Piece]:
        return plan.pieces(*manifest.chunks.range_of(chunk, chunk + 1))

    def agrees(chunk: int, received: Mapping[Piece, torch.Tensor]) -> bool:
        def bytes_of(piece: Piece) -> memoryview:
            slot, offset, num_bytes = piece
            if addresses[slot]:
                return bytes_at(addresses[slot] + offset, num_bytes)
            found = received[piece] if slot in on_device else copies[slot][offset : offset + num_bytes]
            return found.numpy().data

        return manifest.digester.digest_of(map(bytes_of, pieces_of(chunk))) == digests[chunk]

    def differing() -> list[int]:
        found: list[int] = []
        windows = list(_windows(range(manifest.chunks.num_chunks), pieces_of, on_device) if on_device else [every])
        batches = (
            [on_device[slot][offset : offset + num_bytes] for slot, offset, num_bytes in pieces]
            for _, pieces in windows
        )
        with SafeExecutor(num_threads, "ft-transport-verify") as pool:
            for (chunks, pieces), views in zip(windows, BounceBuffers(accelerator).read(batches, after), strict=True):
                received = dict(zip(pieces, views, strict=True))
                results = pool.map(agrees, chunks, repeat(received))
                found += [chunk for chunk, is_equal in zip(chunks, results, strict=True) if not is_equal]
        return found

    # The copies from devices are not queued on the main thread, where a signal handler may interrupt them.
    with SafeExecutor(1, "ft-transport-compare") as thread:
        chunks = thread.submit(differing).result() if on_device else differing()
    for chunk in chunks:
        names = [manifest.tensors[filled[slot]].name for slot, _, _ in pieces_of(chunk)]
        yield f"the bytes differ in {', '.join(names[:5])}" + (" …" if len(names) > 5 else "")


def _windows(
    chunks: Iterable[int], pieces_of: Callable[[int], Iterable[Piece]], on_device: Container[int]
) -> Iterator[tuple[Sequence[int], list[Piece]]]:
    """Group consecutive chunks such that the pieces on devices fit into a buffer. Yield each with these pieces."""
    window: list[int] = []
    pieces: list[Piece] = []
    num_bytes = 0
    for chunk in chunks:
        own = [piece for piece in pieces_of(chunk) if piece[0] in on_device]
        own_bytes = sum(padded_bytes(piece[2]) for piece in own)
        if pieces and num_bytes + own_bytes > HALF_BYTES:
            yield window, pieces
            window, pieces, num_bytes = [], [], 0
        window.append(chunk)
        pieces += own
        num_bytes += own_bytes
    if window:
        yield window, pieces


def _flat(source: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, on its device. A view if the tensor is contiguous."""
    return as_bytes(source.detach().view(carrier_of(source.dtype)).contiguous())
