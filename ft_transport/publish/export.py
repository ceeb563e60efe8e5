"""The export of a version: a collective write in which all ranks send their data to the first, which writes the files.

If several ranks have the same bytes, the plan selects one of them to send these bytes. After the last vote, the version
is on disk, and all ranks can continue training.
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
    shown_names,
    write_box,
)
from ft_transport.checkpoint.roots import DirectoryRoot
from ft_transport.checkpoint.write_items import Described, WriteItem, describe
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import decode_message
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
"""Larger than any adapter, because PEFT and engines expect an adapter in one file."""
_SINGLE_NAMES: Final = {"adapter": "adapter_model.safetensors", "weights": "model.safetensors"}


_header_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, Renamed])
"""Decodes the message of `ExportJob.header`: a snapshot's header, and the engines' names of the rank's tensors."""
_digests_decoder: Final = msgspec.msgpack.Decoder(list[int])


@dataclass(slots=True, kw_only=True)
class ExportResources:
    """The resources that all exports of a publisher use on one rank.

    Attributes:
        agreement: The agreement of the publisher's ranks, used for exports only.
        directory: Directory of the versions; used only on the first rank.
        weight_format: Format of every version.
        check_features: Raises an error if an engine cannot apply one of the given features of an adapter; called only
            on the first rank.
        is_private: Whether only the owner may read the files. Otherwise the umask applies.
        collective: The collective write into the directory.
        stager: Copies the weights into a snapshot.
        snapshot: The copy of this rank's weights; ``None`` outside an export.
        plan: The plan of the last export, on the first rank. The next export reuses it if the structure is the same.
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
        self.collective = CollectiveWrite(self.agreement, DirectoryRoot(self.directory), all_write=False)
        self.stager = Stager(
            max_snapshots=1, num_threads=default_num_threads(), chunk_bytes=CHUNK_BYTES, is_digested=False
        )

    def release(self) -> None:
        """Free the copy of the weights after an export."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None


@dataclass(slots=True)
class ExportJob:
    """One export of a version. All work, including that of the `WriteJob` methods, runs on the training thread.

    Attributes:
        resources: Resources of the publisher.
        version: Number of the version.
        weights: This rank's weights, or a function that returns them.
        files: Other files of the version, by name; read only on the first rank.
        is_missing_ok: Whether the weights may lack tensor names of the previous version.
    """

    resources: ExportResources
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
        """Stage, agree, compare, write and commit the version. Return the version's complete directory.

        Raises:
            TransportError: A rank failed. All ranks raise the same error.
        """
        resources, version = self.resources, self.version
        agreement, collective = resources.agreement, resources.collective
        # Frees the copy of the previous export, if an exception in a signal handler prevented that.
        resources.release()
        agreement.about = f" of version {version}"
        try:
            with collective.attempt(version):
                collective.stage(self)
                location, plan = collective.agree(version, self)
                collective.compare(self)
                directory = Path(location)
                self._write_files(directory, plan)
                return Path(collective.commit(version, lambda: _protect(directory)))
        finally:
            agreement.about = ""
            resources.release()

    def settings(self) -> Mapping[str, object]:
        """Copy the tensors, and return the settings that must be equal on all ranks (`WriteJob.settings`)."""
        resources = self.resources
        self._content = own = content_of(self.weights, resources.weight_format)
        if resources.agreement.is_first and self.files is not None:
            self._files = read_files(self.files)
        taking = Taking(step=self.version, state={_ROOT: own.tensors}, float_dtype=resources.weight_format.dtype)
        resources.snapshot = resources.stager.begin(taking).finish()
        self._header = resources.snapshot.header
        assert isinstance(resources.snapshot.memory, MemoryFile), "a stager without sharing makes copies"
        self._memory = resources.snapshot.memory
        files = {name: digest(data) for name, data in sorted(own.files.items())}
        return {"version": self.version, "kind": own.kind, "files": files, "missing_ok": self.is_missing_ok}

    def admit(self, *, is_retry: bool) -> None:
        """Check, on the first rank, that the version may be published (`WriteJob.admit`).

        Raises:
            StaleVersionError: An equal or greater version exists.
            PublishError: An engine does not apply a feature of the adapter.
        """
        del is_retry
        own, directory = self._content, self.resources.directory
        if own.kind == "adapter":
            self.resources.check_features(features_of(json.loads(own.files[CONFIG_NAME]), own.tensors))
        versions = directory.numbers()
        if versions and self.version <= versions[-1]:
            raise StaleVersionError(
                f"expected a version after {versions[-1]}, the newest in {directory.root}, got {self.version}"
            )

    def take(self) -> TakenSnapshot:
        """Describe this rank's snapshot (`WriteJob.take`)."""
        self._described = _described_by_name(self._header)
        for value in self._described.values:
            raise PublishError("expected only tensors, got another value", path=value.name.removeprefix(f"{_ROOT}."))
        # The kind decides the names of the files, so a plan for another kind is not valid.
        return TakenSnapshot(self._described.structure, values=0, holder=int(self._content.kind == "adapter"))

    def header(self) -> bytes:
        """Return this rank's message to the first rank (`WriteJob.header`)."""
        return msgspec.msgpack.encode((self._header, self._content.renamed))

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """Plan, on the first rank, which rank sends which bytes to which file (`WriteJob.plan`)."""
        kind, weight_format = self._content.kind, self.resources.weight_format
        decoded = [decode_message(header, _header_decoder) for header in headers]
        if weight_format.names is not None:
            check_engine_names([renamed for _, renamed in decoded], weight_format.names)
        described = [_described_by_name(header) for header, _ in decoded]
        max_file_bytes = weight_format.max_shard_bytes if kind == "weights" else _ADAPTER_FILE_BYTES
        plan = make_plan(described, _ROOT, max_file_bytes=max_file_bytes, single_name=_SINGLE_NAMES[kind])
        self.resources.plan = plan
        if kind == "weights" and not self.is_missing_ok:
            self._check_complete({name for each in described for item in each.items for name in item.names})
        return plan.rank_plans

    def digest(self, plan: RankPlan) -> bytes:
        """Return digests of the items that other ranks also have (`WriteJob.digest`)."""
        return msgspec.msgpack.encode([digest(self._bytes_of(self._described.items[at])) for at in plan.compared])

    def compare(self, digests: Sequence[bytes]) -> None:
        """Check, on the first rank, that an item is equal on all ranks that have it (`WriteJob.compare`)."""
        by_rank = [decode_message(each, _digests_decoder) for each in digests]
        find_diverged(self.resources.plan, by_rank)

    def _write_files(self, directory: Path, plan: RankPlan) -> None:
        """Send all data to the first rank, which writes the files, so that the ranks need no shared disk."""

        def write() -> None:
            if self.resources.agreement.is_first:
                self._write_all(directory, plan)
            else:
                self._send(plan)

        self.resources.agreement.run("write", self.resources.agreement.exchange.ending_on_failure(write))

    def _check_complete(self, names: Set[str]) -> None:
        """Refuse weights that lack tensor names of the previous version, because engines load incomplete weights."""
        for number in reversed(self.resources.directory.numbers()):
            before = self.resources.directory.find(number)
            if before is None or (before / CONFIG_NAME).exists():
                continue
            missing = sorted(_names_in(before) - {name.removeprefix(f"{_ROOT}.") for name in names})
            if missing:
                raise PublishError(
                    f"expected the weights to have all names of version {number}, because engines load incomplete "
                    f"weights without an error; missing: {shown_names(missing)}; pass missing_ok=True to publish them "
                    "anyway, and publish weights of another model to another root",
                    path=missing[0],
                )
            return

    def _bytes_of(self, item: WriteItem) -> memoryview:
        return gathered(self._memory.data, item.piece) if item.piece is not None else memoryview(b"")

    def _send(self, plan: RankPlan) -> None:
        for batch in _batches(self._described.items, plan):
            self.resources.agreement.exchange.send(
                b"".join(self._bytes_of(self._described.items[at]) for at, _, _ in batch), 0
            )
            self.resources.agreement.check_others()

    def _write_all(self, directory: Path, plan: RankPlan) -> None:
        consolidation = self.resources.plan.consolidation
        assert consolidation is not None, "make_plan was called with a root"
        create_consolidated(directory, consolidation, is_private=self.resources.is_private)
        with ExitStack() as stack:
            descriptors = []
            for file in consolidation.files:
                descriptors.append(open_regular(directory / file.name, os.O_WRONLY))
                stack.callback(os.close, descriptors[-1])
            for at, file_number, start in plan.targets:
                item = self._described.items[at]
                write_box(descriptors[file_number], self._bytes_of(item), item, start)
            for rank in range(1, self.resources.agreement.size):
                self._receive(rank, descriptors)
            for descriptor in descriptors:
                os.fsync(descriptor)
        self._write_other_files(directory, consolidation)

    def _receive(self, rank: int, descriptors: Sequence[int]) -> None:
        items = self.resources.plan.described[rank].items
        for batch in _batches(items, self.resources.plan.rank_plans[rank]):
            num_bytes = sum(items[at].num_bytes for at, _, _ in batch)
            data = memoryview(self.resources.agreement.exchange.receive(num_bytes, rank))
            for at, file_number, start in batch:
                item = items[at]
                write_box(descriptors[file_number], data[: item.num_bytes], item, start)
                data = data[item.num_bytes :]
            self.resources.agreement.check_others()

    def _write_other_files(self, directory: Path, consolidation: Consolidation) -> None:
        if len(consolidation.files) > 1:
            write_small(directory, INDEX_NAME, consolidation.index, is_private=self.resources.is_private)
        for name, data in {**self._files, **self._content.files}.items():
            write_small(directory, name, data, is_private=self.resources.is_private)


def _protect(directory: Path) -> None:
    for path in directory.iterdir():
        make_read_only(path)


def _names_in(directory: Path) -> set[str]:
    """Return the names of all tensors in a version's safetensors files. Skips files that cannot be read."""
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (OSError, SafetensorError) as error:
            # Logs the text: a log handler that stores the error would keep the frames, and so the snapshot, alive.
            reason = str(error)
            logger.warning("could not read %s, so the new weights are not checked for its tensors: %s", path, reason)
    return names


def _described_by_name(header: bytes) -> Described:
    """Describe a snapshot, with one write item for each tensor name, so that the files have all names of tied tensors.

    Engines and ``from_pretrained`` look up every name. With FSDP2, tied parameters are one DTensor with two names.
    """
    described = describe([_manifest_of(header)], 0)
    # The key is the name alone, so that ranks can compare a tensor that is tied on some ranks only.
    described.items = [
        item._replace(key=(name, item.offset), names=(name,)) for item in described.items for name in item.names
    ]
    return described


def _batches(items: Sequence[WriteItem], plan: RankPlan) -> Iterator[list[tuple[int, int, int]]]:
    """Divide the writes of a plan into messages; sender and receiver compute the same messages."""
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
    """Decode the manifest at the beginning of a safetensors file."""
    length = int.from_bytes(header[:8], "little")
    return decode_header(header[8 : 8 + length])
