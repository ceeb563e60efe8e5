"""The parts of a collective write that are specific to versions: every rank sends its data, the first one writes files.

Each byte comes from one rank that has it. After the last vote the version is on disk, and the ranks are free.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from ft_transport.checkpoint.collective_write import CollectiveWrite, TakenSnapshot
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.plan import (
    INDEX_NAME,
    Consolidation,
    RankPlan,
    SavePlan,
    create_consolidated,
    find_diverged,
    make_plan,
    write_box,
)
from ft_transport.checkpoint.write_items import Described, WriteItem, describe
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import from_msgpack
from ft_transport.errors import PublishError, StaleVersionError
from ft_transport.publish.adapter import CONFIG_NAME, features_of
from ft_transport.publish.content import (
    Content,
    Files,
    Renamed,
    WeightFormat,
    Weights,
    check_engine_names,
    content_of,
    read_files,
    shown,
)
from ft_transport.runtime.regular_files import make_read_only, open_regular
from ft_transport.settings import default_num_threads
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.wire.chunks import CHUNK_BYTES, digest
from ft_transport.wire.manifest import Manifest, decode_header
from ft_transport.wire.snapshot import MemoryFile, Snapshot, gathered

logger = logging.getLogger(__name__)

_ROOT: Final = "weights"
_BATCH_BYTES: Final = 32 << 20
_ADAPTER_FILE_BYTES: Final = 1 << 62
"""PEFT and engines look for one file."""
_KINDS: Final = ("adapter", "weights")
_SINGLE_NAMES: Final = {"adapter": "adapter_model.safetensors", "weights": "model.safetensors"}


class _Header(Struct, frozen=True, array_like=True):
    """A rank's message to the first rank: the header of its snapshot, and the engines' names of its tensors."""

    header: bytes
    renamed: Renamed


_header_decoder: Final = msgspec.msgpack.Decoder(_Header)
_digests_decoder: Final = msgspec.msgpack.Decoder(list[int])


@dataclass(slots=True, kw_only=True)
class ExportMeans:
    """The resources that all exports of a publisher share on one rank.

    Attributes:
        agreement: An agreement of the group, for exports only.
        directory: Directory of the versions; used only on the first rank.
        weight_format: Format of every version.
        check_features: Refuses an adapter for features beyond plain LoRA; called only on the first rank.
        is_private: Whether only the owner may read the files; else the umask applies.
        collective: The collective write into the directory.
        stager: Copies the weights.
        snapshot: The copy, during an export.
        plan: The plan of the last export, on the first rank: the next one of the same structure uses it again.
    """

    agreement: Agreement
    directory: NumberedDirectory
    weight_format: WeightFormat
    check_features: Callable[[Mapping[str, object]], None]
    is_private: bool
    collective: CollectiveWrite = field(init=False)
    stager: Stager = field(init=False)
    snapshot: Snapshot | None = None
    plan: SavePlan = field(init=False)

    def __post_init__(self) -> None:
        self.collective = CollectiveWrite(self.agreement, self.directory, all_write=False)
        self.stager = Stager(
            max_snapshots=1, num_threads=default_num_threads(), chunk_bytes=CHUNK_BYTES, is_digested=False
        )

    def release(self) -> None:
        """Free the copy of the weights."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None

    def close(self) -> None:
        """Free the memory."""
        self.stager.close()


@dataclass(slots=True)
class ExportJob:
    """One export: the `WriteJob` that copies, digests and sends on the calling thread, the training thread.

    Attributes:
        means: The publisher's resources.
        version: The version's number.
        weights: This rank's part of the version, or a function that returns it.
        files: The other files of the version's directory, by name; read only on the first rank.
        is_missing_ok: Whether weights may lack names of the previous weights.
    """

    means: ExportMeans
    version: int
    weights: Weights | Callable[[], Weights]
    files: Files | None
    is_missing_ok: bool
    _content: Content = field(init=False)
    _files: Mapping[str, bytes] = field(init=False, default_factory=dict)
    _memory: MemoryFile = field(init=False)
    _header: bytes = field(init=False)
    _described: Described = field(init=False)

    def run(self) -> Path:
        """Export a version: stage, agree, write and commit. Return its directory, complete and on disk.

        Raises:
            TransportError: A rank failed; the same error on all ranks.
        """
        means, agreement, collective, version = self.means, self.means.agreement, self.means.collective, self.version
        # Leftovers, if a signal handler raised at the end of the previous export.
        means.release()
        agreement.about = f" of version {version}"
        try:
            with collective.attempt(version):
                collective.stage(self)
                directory, plan = collective.agree(version, self)
                collective.compare(self)
                self._write_files(directory, plan)
                return collective.commit(version, lambda: _protect(directory))
        finally:
            agreement.about = ""
            means.release()

    def settings(self) -> Mapping[str, object]:
        """See `WriteJob`: copies the tensors."""
        means = self.means
        self._content = own = content_of(self.weights, means.weight_format)
        if means.agreement.is_first and self.files is not None:
            self._files = read_files(self.files)
        taking = Taking(step=self.version, state={_ROOT: own.tensors}, float_dtype=means.weight_format.dtype)
        means.snapshot = means.stager.begin(taking).finish()
        self._header = means.snapshot.header
        assert isinstance(means.snapshot.memory, MemoryFile), "nothing of it is shared"
        self._memory = means.snapshot.memory
        files = {name: digest(data) for name, data in sorted(own.files.items())}
        return {"version": self.version, "kind": own.kind, "files": files, "missing_ok": self.is_missing_ok}

    def admit(self, *, is_retry: bool) -> None:
        """See `WriteJob`.

        Raises:
            StaleVersionError: The version is not newer than every existing one.
            PublishError: An engine does not apply a feature of the adapter, as far as this rank has it.
        """
        del is_retry
        own, directory = self._content, self.means.directory
        if own.kind == "adapter":
            self.means.check_features(features_of(json.loads(own.files[CONFIG_NAME]), own.tensors))
        versions = directory.numbers()
        if versions and self.version <= versions[-1]:
            raise StaleVersionError(
                f"expected a version after {versions[-1]}, which was published to {directory.root} before, got "
                f"{self.version}"
            )

    def take(self) -> TakenSnapshot:
        """See `WriteJob`."""
        self._described = _described_by_name(self._header)
        for value in self._described.values:
            raise PublishError("expected tensors alone, got something else", path=value.name.removeprefix(f"{_ROOT}."))
        # The kind decides the names of the files.
        return TakenSnapshot(self._described.structure, 0, _KINDS.index(self._content.kind))

    def header(self) -> bytes:
        """See `WriteJob`."""
        return msgspec.msgpack.encode(_Header(self._header, self._content.renamed))

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """See `WriteJob`."""
        kind, weight_format = self._content.kind, self.means.weight_format
        decoded = [from_msgpack(header, _header_decoder) for header in headers]
        if weight_format.names is not None:
            check_engine_names([each.renamed for each in decoded], weight_format.names)
        described = [_described_by_name(each.header) for each in decoded]
        max_file_bytes = weight_format.max_shard_bytes if kind == "weights" else _ADAPTER_FILE_BYTES
        plan = make_plan(described, _ROOT, max_file_bytes=max_file_bytes, single_name=_SINGLE_NAMES[kind])
        self.means.plan = plan
        if kind == "weights" and not self.is_missing_ok:
            self._check_complete({name for each in described for item in each.items for name in item.names})
        return plan.rank_plans

    def digest(self, plan: RankPlan) -> bytes:
        """See `WriteJob`."""
        return msgspec.msgpack.encode([digest(self._bytes_of(self._described.items[at])) for at in plan.compared])

    def compare(self, digests: Sequence[bytes]) -> None:
        """See `WriteJob`."""
        by_rank = [from_msgpack(each, _digests_decoder) for each in digests]
        find_diverged(self.means.plan, by_rank)

    def _write_files(self, directory: Path, plan: RankPlan) -> None:
        """Write the files on the first rank alone, so that the ranks need no shared disk."""

        def write() -> None:
            if self.means.agreement.is_first:
                self._write_all(directory, plan)
            else:
                self._send(plan)

        self.means.agreement.run("write", self.means.agreement.exchange.ending_on_failure(write))

    def _check_complete(self, names: Set[str]) -> None:
        """Refuse weights that lack names of the previous weights: engines load a part of a model without an error."""
        for number in reversed(self.means.directory.numbers()):
            before = self.means.directory.find(number)
            if before is None or (before / CONFIG_NAME).exists():
                continue
            missing = sorted(_names_in(before) - {name.removeprefix(f"{_ROOT}.") for name in names})
            if missing:
                raise PublishError(
                    f"expected the weights to have all names of version {number}, because engines take a part of a "
                    f"model without an error; missing: {shown(missing)}; pass missing_ok=True if that is meant, and "
                    "publish weights of another model to another root",
                    path=missing[0],
                )
            return

    def _bytes_of(self, item: WriteItem) -> memoryview:
        return gathered(self._memory.data, item.piece) if item.piece is not None else memoryview(b"")

    def _send(self, plan: RankPlan) -> None:
        for batch in _batches(self._described.items, plan):
            self.means.agreement.exchange.send(
                b"".join(self._bytes_of(self._described.items[at]) for at, _, _ in batch), 0
            )
            self.means.agreement.check_others()

    def _write_all(self, directory: Path, plan: RankPlan) -> None:
        consolidation = self.means.plan.consolidation
        assert consolidation is not None, "it was asked for"
        create_consolidated(directory, consolidation, is_private=self.means.is_private)
        with ExitStack() as stack:
            descriptors = []
            for file in consolidation.files:
                descriptors.append(open_regular(directory / file.name, os.O_WRONLY))
                stack.callback(os.close, descriptors[-1])
            for at, file_number, start in plan.targets:
                item = self._described.items[at]
                write_box(descriptors[file_number], self._bytes_of(item), item, start)
            for rank in range(1, self.means.agreement.size):
                self._receive(rank, descriptors)
            for descriptor in descriptors:
                os.fsync(descriptor)
        self._write_other_files(directory, consolidation)

    def _receive(self, rank: int, descriptors: Sequence[int]) -> None:
        items = self.means.plan.described[rank].items
        for batch in _batches(items, self.means.plan.rank_plans[rank]):
            num_bytes = sum(items[at].num_bytes for at, _, _ in batch)
            data = memoryview(self.means.agreement.exchange.receive(num_bytes, rank))
            for at, file_number, start in batch:
                item = items[at]
                write_box(descriptors[file_number], data[: item.num_bytes], item, start)
                data = data[item.num_bytes :]
            self.means.agreement.check_others()

    def _write_other_files(self, directory: Path, consolidation: Consolidation) -> None:
        if len(consolidation.files) > 1:
            write_small(directory / INDEX_NAME, consolidation.index, is_private=self.means.is_private)
        for name, data in {**self._files, **self._content.files}.items():
            write_small(directory / name, data, is_private=self.means.is_private)


def _protect(directory: Path) -> None:
    for path in directory.iterdir():
        make_read_only(path)


def _names_in(directory: Path) -> set[str]:
    """Return the names of all tensors in a version's readable files."""
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (OSError, SafetensorError) as error:
            # A log handler that stores the record would keep the error, and with it the snapshot, alive.
            reason = str(error)
            logger.warning("%s cannot be read, so that newer weights are not compared with it: %s", path, reason)
    return names


def _described_by_name(header: bytes) -> Described:
    """Describe a snapshot with one item for each name: the files contain the bytes of tied tensors twice.

    Engines and ``from_pretrained`` look every name up, and FSDP2 leaves tied parameters one DTensor under two names.
    """
    described = describe([_manifest_of(header)], 0)
    # The name alone is the key, so that ranks also compare tensors that only some of them tie.
    described.items = [
        item._replace(key=(name, item.offset), names=(name,)) for item in described.items for name in item.names
    ]
    return described


def _batches(items: Sequence[WriteItem], plan: RankPlan) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the batches of one message each; sender and receiver compute the same batches."""
    batch: list[tuple[int, int, int]] = []
    num_bytes = 0
    for target in plan.targets:
        size = items[target[0]].num_bytes
        if not size:
            continue
        if batch and num_bytes + size > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(target)
        num_bytes += size
    if batch:
        yield batch


def _manifest_of(header: bytes) -> Manifest:
    """Return the manifest at the beginning of a safetensors file."""
    length = int.from_bytes(header[:8], "little")
    return decode_header(header[8 : 8 + length])
