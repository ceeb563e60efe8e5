"""Loading a checkpoint into the layout of each rank, independent of the layout in which it was saved.

The code that finds the data for a rank is shared with states that arrive over the network from ranks in another layout
(``state.resharding``, ``wire.reshard``): the saving ranks are the sources, and their bytes lie in files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import torch

from ft_transport.checkpoint.chunk_reading import DataFiles, Need, read_needs
from ft_transport.checkpoint.inventory import FoundCheckpoint
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
from ft_transport.state.encodings import decode_simple
from ft_transport.state.matching import Incoming
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
    """A state that was read completely and verified.

    Attributes:
        step: The committed step of the state.
        state: The state; the receiver's own tensors were loaded in place.
        num_bytes_read: Number of bytes of data files that this rank has read.
    """

    step: int
    state: T
    num_bytes_read: int
    _manifest: Manifest

    def differences(self, state: object) -> tuple[str, ...]:
        """Return where ``state`` differs, bit for bit, from the loaded part that all ranks share.

        Load functions do not affect the comparison, even if they changed the loaded state.

        Args:
            state: The state after loading, without the rank-local part. It must not change meanwhile.

        Returns:
            Paths, each with a description of the difference; empty if there are none.

        Raises:
            CheckpointError: The state was loaded without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise CheckpointError("expected a state that was loaded with is_comparable=True")
        return find_differences(self._manifest, state, num_threads=default_num_threads())


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The destination of a load; ``CheckpointStore.load`` describes each argument.

    Attributes:
        into: This rank's own state.
        like: See ``HTTPTransport.fetch_sharded``.
        check: Called with a description of the content before any of it arrives.
        is_comparable: Whether `LoadedCheckpoint.differences` will be called.
    """

    into: object
    like: LikeFunction | None
    check: Callable[[Incoming], None] | None
    is_comparable: bool


_description_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes, ...]])
"""Decodes the files that describe a checkpoint: the list of files, and the description of each rank."""


def load(
    found: FoundCheckpoint, destination: Destination, settings: StoreSettings, trust: Trust, agreement: Agreement
) -> LoadedCheckpoint[Any]:
    """Load a checkpoint on all ranks, or on none.

    Args:
        found: The checkpoint; the same on all ranks.
        destination: The destination on this rank.
        settings: The settings of the store.
        trust: Decides which checkpoints are trusted.
        agreement: The agreement of the group.

    Raises:
        TransportError: The same on every rank. Tensors of ``into`` that already had new data were overwritten with NaN
            patterns.
    """
    loading: _Loading | None = None
    retries = ReadRetries(settings.retry_s)

    def plan() -> _Loading:
        with collector_paused():
            return _Loading(found.directory, described, destination, agreement)

    try:
        own = agreement.on_first("read its description", lambda: _read_description(found, trust, retries))
        described = agreement.broadcast("receive its description", own)
        loading = planned = agreement.run("plan what to read", plan)
        agreement.run("read", lambda: planned.read(retries, is_read_once=settings.read == "once"))
        return agreement.run("load", planned.finish)
    except BaseException as error:
        if loading is not None:
            loading.poison(error)
        agreement.reconnect()
        raise


def _read_description(found: FoundCheckpoint, trust: Trust, retries: ReadRetries) -> bytes:
    directory = found.directory
    manifest = read_manifest(directory, found.step, trust, retries)
    damages = find_damage(directory, manifest.files, manifest.hash, retries, None)
    if damages:
        raise CheckpointDamagedError("; ".join(damages), files=tuple(text.split(":")[0] for text in damages))
    ranks = read_rank_files(directory, manifest, retries)
    rank_files = {rank_file_name(rank) for rank in range(manifest.num_ranks)}
    for entry in manifest.files:
        # Large files are verified as they are read, and only other programs read the whole tensors.
        if entry.name not in rank_files and not entry.name.endswith((DATA_SUFFIX, ".safetensors")):
            read_file(directory, entry, manifest.hash, retries)
    return msgspec.msgpack.encode((encode_manifest(manifest), ranks))


class _Loading:
    """One rank's part of a load."""

    def __init__(self, directory: Path, described: bytes, destination: Destination, agreement: Agreement) -> None:
        encoded, rank_files = _description_decoder.decode(described)
        manifest = self._manifest = decode_manifest(encoded, name=MANIFEST_NAME)
        self._ranks = decode_rank_files(rank_files, manifest)
        self._destination = destination
        self._agreement = agreement
        entries: dict[str, FileEntry] = {entry.name: entry for entry in manifest.files}
        self._files = DataFiles.of(directory, [entries[each.data_file] for each in self._ranks], manifest.hash)
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
        self._needs = _needs_of_shared(self._ranks, resharding.wanted, self._restores[0], names)
        self._plan_local(local_into)
        self._check_needs()

    def _plan_local(self, into: object) -> None:
        """Plan the rank-local part, which comes from the rank of the same number if as many ranks saved."""
        if not self._manifest.local_keys:
            return
        rank, num_ranks = self._agreement.rank, self._agreement.size
        if num_ranks != len(self._ranks):
            # A caller with a check of its own notices from the loaded state that these keys are missing.
            if isinstance(into, Mapping) and into and self._destination.check is None:
                raise RestoreError(
                    f"expected a checkpoint of {num_ranks} ranks, for what each has for itself; it was saved by "
                    f"{len(self._ranks)}: leave {sorted(map(str, into))} out of what is loaded"
                )
            return
        stored = self._ranks[rank]
        local = stored.manifests[LOCAL]
        restore = Restore(local, into=into)
        self._restores.append(restore)
        for index, entry in enumerate(local.tensors):
            if entry.end > entry.start:
                at = Slice(stored.positions[LOCAL][index], entry.end - entry.start)
                self._needs.append(Need(rank, at, restore, Slice(entry.start, at.block_bytes), entry.name))

    def _check_needs(self) -> None:
        """Check that all requested bytes lie inside of their files, since the description may give any layout."""
        for need in self._needs:
            entry = self._files.files[need.file]
            if not 0 <= need.piece.start < need.piece.end <= entry.num_bytes:
                raise damaged(
                    rank_file_name(need.file),
                    f"expected bytes inside of {entry.name}, which has {entry.num_bytes}, got {need.piece.start} to "
                    f"{need.piece.end}",
                    need.path,
                )

    def read(self, retries: ReadRetries, *, is_read_once: bool) -> None:
        """Read the data that this rank needs into its destination."""
        self._num_bytes_read = read_needs(
            self._needs, self._files, self._agreement, retries=retries, is_read_once=is_read_once
        )

    def finish(self) -> LoadedCheckpoint[Any]:
        """Build the state."""
        state, *local = (restore.finish() for restore in self._restores)
        if local:
            state = {**cast(Any, state), **cast(Any, local[0])}
        manifest = self._shared_manifest
        if self._destination.is_comparable:
            digests = digest_chunks(manifest, self._restores[0].present, num_threads=default_num_threads())
            manifest = dataclasses.replace(manifest, digests=tuple(digests))
        return LoadedCheckpoint(
            step=self._manifest.step, state=state, num_bytes_read=self._num_bytes_read, _manifest=manifest
        )

    def poison(self, error: BaseException) -> None:
        """Make sure that no receiver trains on a partly loaded state."""
        for restore in self._restores:
            if restore.destination_touched:
                restore.poison()
                error.destination_touched = True  # type: ignore[attr-defined]


def _split(into: object, manifest: CheckpointManifest) -> tuple[object, object]:
    """Return the part of the state that all ranks share, and the rank-local part."""
    if into is None or not manifest.local_keys:
        return into, None
    if not isinstance(into, Mapping):
        raise CheckpointError(f"expected a dict to load into, as was saved, got {type(into).__name__}")
    local = {key: value for key, value in into.items() if key in manifest.local_keys}
    return {key: value for key, value in into.items() if key not in local}, local


def _only_keys(rank: StoredRank, keys: Collection[object]) -> StoredRank:
    """Return the rank's description with only some top-level keys of the shared part."""
    shared, *others = rank.manifests
    tree: Any = shared.tree
    pairs = zip(tree.items[::2], tree.items[1::2], strict=True)
    items = [part for key, value in pairs if _key_of(key) in keys for part in (key, value)]
    tree = msgspec.structs.replace(tree, items=items)
    return dataclasses.replace(rank, manifests=(dataclasses.replace(shared, tree=tree), *others))


def _key_of(node: Any) -> object:
    """Return the key that a node stands for, ``None`` if it is neither text nor a whole number."""
    key = decode_simple(node) if isinstance(node, StringNode) else node
    return key if isinstance(key, (str, int)) else None


def _refuse_misfits(tree: Node, into: object, restore: Restore) -> None:
    """Refuse a state whose tensors would not all be loaded: a trainer would not notice."""
    incoming = restore.incoming
    misfits = [f"{each.path}: {each.own} here, {each.received} there" for each in incoming.mismatches]
    mismatching = {each.path for each in incoming.mismatches}
    for path, node, tensor in _tensors_of(tree, into, ""):
        if node is None:
            misfits.append(f"{path}: not there")
        elif path not in mismatching and not restore.fills(node, tensor):
            misfits.append(f"{path}: here it shares memory in another way than there")
    if misfits:
        shown = "; ".join(misfits[:_MAX_SHOWN]) + ("; …" if len(misfits) > _MAX_SHOWN else "")
        raise RestoreError(
            f"expected a checkpoint that has all tensors of the state to load into, as they are here; {shown}; nothing "
            "was loaded"
        )


def _tensors_of(node: Any, into: object, path: str) -> Iterator[tuple[str, Node, torch.Tensor]]:
    """Yield the receiver's tensors, each with the node at its place, ``None`` where the node is no tensor."""
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
    ranks: Sequence[StoredRank], wanted: Sequence[Wanted], restore: Restore, names: Sequence[str]
) -> list[Need]:
    written = [_only_written(each, ranks) for each in wanted]
    planner = Planner([each.manifests[SHARED] for each in ranks], names)
    needs = []
    for number, reads in enumerate(planner.plan(written)):
        manifest, positions = ranks[number].manifests[SHARED], ranks[number].positions[SHARED]
        for read in reads:
            piece = planner.held(read, number)
            node = read.wanted.nodes[read.wanted.sources.index(number)]
            entry = manifest.tensors[node.index]
            moved = Slice(positions[node.index] + piece.start - entry.start, piece.block_bytes, piece.loops)
            needs.append(Need(number, moved, restore, planner.destination(read), read.wanted.path))
    return needs


def _only_written(wanted: Wanted, ranks: Sequence[StoredRank]) -> Wanted:
    """Drop ranks that had a wanted tensor but have not written it."""
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
