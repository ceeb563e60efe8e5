"""Loads a checkpoint into the layout of the loading ranks, whatever the layout of the ranks that saved it.

``state.resharding`` and ``wire.reshard`` find the bytes that a rank needs. They also serve transfers over the network;
here, the sources are the ranks that saved the checkpoint, and their bytes are in files.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import torch

from ft_transport.checkpoint.chunk_reader import DataFiles
from ft_transport.checkpoint.chunk_reading import Need, read_needs
from ft_transport.checkpoint.files import CheckpointFiles
from ft_transport.checkpoint.found import FoundCheckpoint
from ft_transport.checkpoint.manifest import (
    DATA_SUFFIX,
    MANIFEST_NAME,
    NOT_HERE,
    CheckpointManifest,
    FileEntry,
    StoredRank,
    Trust,
    damaged,
    decode_manifest,
    encode_manifest,
    rank_file_name,
)
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.stored_files import (
    ReadRetries,
    decode_rank_files,
    find_damage,
    read_file,
    read_manifest,
    read_rank_files,
)
from ft_transport.checkpoint.write_items import LOCAL, SHARED
from ft_transport.coordination.agreement import Agreement
from ft_transport.errors import CheckpointDamagedError, CheckpointError, RestoreError
from ft_transport.http.client.manifests import digest_chunks
from ft_transport.runtime.decoding import collector_paused
from ft_transport.settings import default_num_threads
from ft_transport.state.comparison import find_differences
from ft_transport.state.matching import Incoming
from ft_transport.state.python_values import decode_simple
from ft_transport.state.resharding import LikeFunction, reshard
from ft_transport.state.restore import Restore
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import (
    DefaultDictNode,
    DTensorNode,
    LayoutNode,
    LeafNode,
    MappingNode,
    NamedTupleNode,
    Node,
    QuantizedNode,
    SequenceNode,
    StringNode,
    TensorNode,
    ViewNode,
)
from ft_transport.wire.reshard import Planner, Wanted
from ft_transport.wire.slices import Slice

T = TypeVar("T")

_MAX_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint(Generic[T]):
    """A checkpoint that was read completely and verified.

    Attributes:
        step: The step of the checkpoint.
        state: The loaded state. Tensors of ``into`` were loaded in place.
        num_bytes_read: Number of bytes that this rank has read from data files.
    """

    step: int
    state: T
    num_bytes_read: int
    _manifest: Manifest

    def differences(self, state: object) -> tuple[str, ...]:
        """Compare a state bit for bit with the loaded one. The rank-local part is not compared.

        The comparison uses digests from the time of the load, so later changes of the loaded tensors do not affect it.

        Args:
            state: The state to compare, without its rank-local part. It must not change during the call.

        Returns:
            The path of each difference, with a description; empty if there are none.

        Raises:
            CheckpointError: The state was loaded without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise CheckpointError("expected a state that was loaded with is_comparable=True")
        return find_differences(self._manifest, state, num_threads=default_num_threads())


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One rank's destination of a load, from the arguments of ``CheckpointStore.load``.

    Attributes:
        into: This rank's own state, whose tensors are loaded in place.
        like: Decides how new tensors are sharded.
        check: Called with a description of the checkpoint before any data is read.
        is_comparable: Whether `LoadedCheckpoint.differences` will be called.
    """

    into: object
    like: LikeFunction | None
    check: Callable[[Incoming], None] | None
    is_comparable: bool


_description_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes, ...]])
"""Decodes the message of `_read_description`: ``manifest.json`` and each ``rank-K.json``."""


def load(
    found: FoundCheckpoint, destination: Destination, settings: StoreSettings, trust: Trust, agreement: Agreement
) -> LoadedCheckpoint[Any]:
    """Load a checkpoint. It succeeds on all ranks or fails on all ranks.

    Args:
        found: The checkpoint; the same on all ranks.
        destination: This rank's own state and how to load it.
        settings: The settings of the store.
        trust: Verifies the signature of the checkpoint.
        agreement: The agreement of the group.

    Raises:
        TransportError: The load failed; the same error on every rank. Tensors of ``into`` that already had new data
            were overwritten with NaN patterns.
    """
    loading: _Loading | None = None
    retries = ReadRetries(settings.retry_s)

    def plan() -> _Loading:
        with collector_paused():
            return _Loading(found.files, described, destination, agreement)

    try:
        own = agreement.on_first("read the description", lambda: _read_description(found, trust, retries))
        described = agreement.broadcast("receive the description", own)
        loading = planned = agreement.run("plan what to read", plan)
        agreement.run("read", lambda: planned.read(retries, is_read_once=settings.read == "once"))
        return agreement.run("load", planned.finish)
    except BaseException as error:
        if loading is not None:
            loading.poison(error)
        agreement.reconnect()
        raise


def _read_description(found: FoundCheckpoint, trust: Trust, retries: ReadRetries) -> bytes:
    files = found.files
    manifest = read_manifest(files, found.step, trust, retries)
    damages = find_damage(files, manifest.files, manifest.hash, retries, None)
    if damages:
        raise CheckpointDamagedError("; ".join(damages), files=tuple(text.split(":")[0] for text in damages))
    ranks = read_rank_files(files, manifest, retries)
    rank_files = {rank_file_name(rank) for rank in range(manifest.num_ranks)}
    for entry in manifest.files:
        # A load verifies data files as it reads them, and does not read consolidated files at all.
        if entry.name not in rank_files and not entry.name.endswith((DATA_SUFFIX, ".safetensors")):
            read_file(files, entry, manifest.hash, retries)
    return msgspec.msgpack.encode((encode_manifest(manifest), ranks))


class _Loading:
    """Loads one checkpoint on one rank: the constructor plans, `read` reads the data, `finish` builds the state."""

    def __init__(
        self, files: CheckpointFiles, described: bytes, destination: Destination, agreement: Agreement
    ) -> None:
        encoded, rank_files = _description_decoder.decode(described)
        manifest = self._manifest = decode_manifest(encoded, name=MANIFEST_NAME)
        self._ranks = decode_rank_files(rank_files, manifest)
        self._destination = destination
        self._agreement = agreement
        entries: dict[str, FileEntry] = {entry.name: entry for entry in manifest.files}
        self._first_files = list(itertools.accumulate((len(each.data_files) for each in self._ranks), initial=0))
        data_files = [entries[name] for each in self._ranks for name in each.data_files]
        self._files = DataFiles.of(files, data_files, manifest.hash)
        self._num_bytes_read = 0
        shared_into, local_into = _split(destination.into, manifest)
        if isinstance(shared_into, Mapping):
            self._ranks = [_only_keys(each, shared_into.keys()) for each in self._ranks]
        names = [f"rank {number} of the checkpoint" for number in range(len(self._ranks))]
        manifests = [each.manifests[SHARED] for each in self._ranks]
        resharding = reshard(manifests, shared_into, like=destination.like, names=names)
        self._shared_manifest = resharding.manifest
        self._restores = [Restore(resharding.manifest, into=shared_into)]
        if destination.check is not None:
            destination.check(self._restores[0].incoming)
        else:
            _refuse_misfits(resharding.manifest.tree, shared_into, self._restores[0])
        self._needs = _needs_of_shared(self._ranks, self._first_files, resharding.wanted, self._restores[0], names)
        self._plan_local(local_into)
        self._check_needs()

    def _plan_local(self, into: object) -> None:
        """Plan the rank-local part: rank K loads the part that rank K saved, if the number of ranks is the same."""
        if not self._manifest.local_keys:
            return
        rank, num_ranks = self._agreement.rank, self._agreement.size
        if num_ranks != len(self._ranks):
            # A caller with its own `check` handles the missing keys in the loaded state.
            if isinstance(into, Mapping) and into and self._destination.check is None:
                raise RestoreError(
                    f"expected a checkpoint of {num_ranks} ranks to load rank-local state, got a checkpoint of "
                    f"{len(self._ranks)} ranks; omit {sorted(map(str, into))} from the state to load into"
                )
            return
        stored = self._ranks[rank]
        local = stored.manifests[LOCAL]
        restore = Restore(local, into=into)
        self._restores.append(restore)
        for index, entry in enumerate(local.tensors):
            if entry.end > entry.start:
                file = self._first_files[rank] + stored.files[LOCAL][index]
                at = Slice(stored.positions[LOCAL][index], entry.end - entry.start)
                self._needs.append(Need(file, at, restore, Slice(entry.start, at.block_bytes), entry.name))

    def _check_needs(self) -> None:
        """Check that all needed bytes lie inside their files; ``rank-K.json`` may be forged."""
        for need in self._needs:
            entry = self._files.files[need.file]
            if not 0 <= need.piece.start < need.piece.end <= entry.num_bytes:
                raise damaged(
                    rank_file_name(bisect_right(self._first_files, need.file) - 1),
                    f"expected bytes inside {entry.name}, which has {entry.num_bytes} bytes, got {need.piece.start} "
                    f"to {need.piece.end}",
                    need.path,
                )

    def read(self, retries: ReadRetries, *, is_read_once: bool) -> None:
        """Read the needed bytes into the tensors of this rank."""
        self._num_bytes_read = read_needs(
            self._needs, self._files, self._agreement, retries=retries, is_read_once=is_read_once
        )

    def finish(self) -> LoadedCheckpoint[Any]:
        """Build the loaded state from tensors and plain values, and return it."""
        state, *local = (restore.finish() for restore in self._restores)
        if local:
            state = {**cast(Any, state), **cast(Any, local[0])}
        manifest = self._shared_manifest
        if self._destination.is_comparable:
            digests = digest_chunks(manifest, self._restores[0].present)
            manifest = dataclasses.replace(manifest, digests=tuple(digests))
        return LoadedCheckpoint(
            step=self._manifest.step, state=state, num_bytes_read=self._num_bytes_read, _manifest=manifest
        )

    def poison(self, error: BaseException) -> None:
        """Overwrite partly loaded tensors with NaN patterns, so that nobody trains on them."""
        for restore in self._restores:
            if restore.destination_touched:
                restore.poison()
                error.destination_touched = True  # type: ignore[attr-defined]


def _split(into: object, manifest: CheckpointManifest) -> tuple[object, object]:
    """Divide a state into the shared part and the rank-local part, by the rank-local keys that the checkpoint lists."""
    if into is None or not manifest.local_keys:
        return into, None
    if not isinstance(into, Mapping):
        raise CheckpointError(f"expected a dict to load into, got {type(into).__name__}")
    local = {key: value for key, value in into.items() if key in manifest.local_keys}
    return {key: value for key, value in into.items() if key not in local}, local


def _only_keys(rank: StoredRank, keys: Collection[object]) -> StoredRank:
    """Return a copy of a rank's description that has only the given top-level keys in its shared part."""
    shared, *others = rank.manifests
    tree: Any = shared.tree
    pairs = zip(tree.items[::2], tree.items[1::2], strict=True)
    items = [part for key, value in pairs if _key_of(key) in keys for part in (key, value)]
    tree = msgspec.structs.replace(tree, items=items)
    return dataclasses.replace(rank, manifests=(dataclasses.replace(shared, tree=tree), *others))


def _key_of(node: Any) -> object:
    """Return the dict key that a node encodes; ``None`` if it is neither text nor a whole number."""
    key = decode_simple(node) if isinstance(node, StringNode) else node
    return key if isinstance(key, (str, int)) else None


def _refuse_misfits(tree: Node, into: object, restore: Restore) -> None:
    """Raise an error if the load would leave a tensor of ``into`` unchanged, which a trainer would not notice."""
    incoming = restore.incoming
    misfits = [f"{each.path}: {each.own} here, {each.received} in the checkpoint" for each in incoming.mismatches]
    mismatching = {each.path for each in incoming.mismatches}
    for path, node, tensor in _tensors_of(tree, into, ""):
        if node is None:
            misfits.append(f"{path}: not in the checkpoint")
        elif path not in mismatching and not restore.fills(node, tensor):
            misfits.append(f"{path}: shares memory with other tensors than in the checkpoint")
    if misfits:
        shown = "; ".join(misfits[:_MAX_SHOWN]) + ("; …" if len(misfits) > _MAX_SHOWN else "")
        raise RestoreError(
            f"expected a checkpoint with all tensors of the state to load into, in the same form; {shown}; nothing was "
            "loaded"
        )


def _tensors_of(node: Any, into: object, path: str) -> Iterator[tuple[str, Node, torch.Tensor]]:
    """Yield path, node and tensor for each tensor of ``into``; ``None`` as node if the checkpoint lacks the tensor."""
    if isinstance(into, torch.Tensor):
        is_tensor = isinstance(node, (TensorNode, LayoutNode, ViewNode, DTensorNode, LeafNode, QuantizedNode))
        yield path or "(root)", node if is_tensor else None, into
    elif isinstance(into, Mapping):
        items = node.items if isinstance(node, (MappingNode, DefaultDictNode)) else []
        stored = {_key_of(key): value for key, value in zip(items[::2], items[1::2], strict=True)}
        for key, value in into.items():
            yield from _tensors_of(stored.get(key), value, f"{path}.{key}" if path else str(key))
    elif isinstance(into, (list, tuple)):
        items = node.items if isinstance(node, (SequenceNode, NamedTupleNode)) else []
        for position, value in enumerate(into):
            below = items[position] if position < len(items) else None
            yield from _tensors_of(below, value, f"{path}.{position}" if path else str(position))


def _needs_of_shared(
    ranks: Sequence[StoredRank],
    first_files: Sequence[int],
    wanted: Sequence[Wanted],
    restore: Restore,
    names: Sequence[str],
) -> list[Need]:
    written = [_only_written(each, ranks) for each in wanted]
    planner = Planner([each.manifests[SHARED] for each in ranks], names)
    needs = []
    for number, reads in enumerate(planner.plan(written)):
        stored = ranks[number]
        manifest, positions, files = stored.manifests[SHARED], stored.positions[SHARED], stored.files[SHARED]
        for read in reads:
            piece = planner.held(read, number)
            node = read.wanted.nodes[read.wanted.sources.index(number)]
            entry = manifest.tensors[node.index]
            moved = Slice(positions[node.index] + piece.start - entry.start, piece.block_bytes, piece.loops)
            file = first_files[number] + files[node.index]
            needs.append(Need(file, moved, restore, planner.destination(read), read.wanted.path))
    return needs


def _only_written(wanted: Wanted, ranks: Sequence[StoredRank]) -> Wanted:
    """Remove the sources that have a tensor but did not write it. Only one rank writes each part of a tensor."""
    kept = [
        at
        for at, (source, node) in enumerate(zip(wanted.sources, wanted.nodes, strict=True))
        if node.index < len(ranks[source].positions[SHARED]) and ranks[source].positions[SHARED][node.index] != NOT_HERE
    ]
    if len(kept) == len(wanted.sources):
        return wanted
    return dataclasses.replace(
        wanted,
        sources=tuple(wanted.sources[at] for at in kept),
        nodes=tuple(wanted.nodes[at] for at in kept),
        layouts=tuple(wanted.layouts[at] for at in kept),
    )
