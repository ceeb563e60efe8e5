"""The parts of a collective write that are specific to versions: every rank sends its data, the first one writes files.

Each byte comes from one rank that has it. After the last vote the version is on disk, and the ranks are free.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
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
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.plain_values import from_msgpack
from ft_transport.errors import PublishError, StaleVersionError
from ft_transport.publish.content import Content, Weights, content_of
from ft_transport.publish.files import Files, read_files
from ft_transport.publish.names import Renamed, check_engine_names, shown
from ft_transport.publish.peft_config import CONFIG_NAME, features_of
from ft_transport.publish.weight_format import WeightFormat
from ft_transport.runtime.regular_files import make_read_only, open_regular
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


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A version to write.

    Attributes:
        version: Its number.
        weights: This rank's part of the version, or a function that returns it.
        files: The other files of the version's directory, by name; read only on the first rank.
        is_missing_ok: Whether weights may lack names of the previous weights.
    """

    version: int
    weights: Weights | Callable[[], Weights]
    files: Files | None
    is_missing_ok: bool


class _Header(Struct, frozen=True, array_like=True):
    """A rank's message to the first rank: the header of its snapshot, and the engines' names of its tensors."""

    header: bytes
    renamed: Renamed


_header_decoder: Final = msgspec.msgpack.Decoder(_Header)
_digests_decoder: Final = msgspec.msgpack.Decoder(list[int])


class Exporter:
    """Exports versions: the `WriteJob` that copies, digests and sends on the calling thread, the training thread.

    Args:
        agreement: An agreement of the group, for exports only.
        directory: Directory of the versions; used only on the first rank.
        weight_format: Format of every version.
        num_threads: Number of threads that copy.
        check_features: Refuses an adapter for features beyond plain LoRA; called only on the first rank.
        is_private: Whether only the owner may read the files; else the umask applies.
    """

    def __init__(
        self,
        agreement: Agreement,
        directory: NumberedDirectory,
        *,
        weight_format: WeightFormat,
        num_threads: int,
        check_features: Callable[[Mapping[str, object]], None],
        is_private: bool = False,
    ) -> None:
        self._agreement = agreement
        self._check_features = check_features
        self._is_private = is_private
        self._format = weight_format
        self._directory = directory
        self._write = CollectiveWrite(agreement, directory, all_write=False)
        self._stager = Stager(max_snapshots=1, num_threads=num_threads, chunk_bytes=CHUNK_BYTES, is_digested=False)
        self._request: ExportRequest | None = None
        self._content: Content | None = None
        self._files: Mapping[str, bytes] = {}
        self._snapshot: Snapshot | None = None
        self._described = Described()
        self._plan: SavePlan | None = None

    def run(self, request: ExportRequest) -> Path:
        """Export a version: stage, agree, write and commit. Return its directory, complete and on disk.

        Raises:
            TransportError: A rank failed; the same error on all ranks.
        """
        # Leftovers, if a signal handler raised at the end of the previous export.
        self._release()
        version = request.version
        self._request, self._agreement.about = request, f" of version {version}"
        try:
            with self._write.attempt(version):
                self._write.stage(self)
                directory, plan = self._write.agree(version, self)
                self._write.compare(self)
                self._write_files(directory, plan)
                return self._write.commit(version, lambda: _protect(directory))
        finally:
            self._agreement.about = ""
            self._release()

    def _release(self) -> None:
        self._request = self._content = None
        self._files = {}
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def close(self) -> None:
        """Free the memory."""
        self._stager.close()

    def settings(self) -> Mapping[str, object]:
        """See `WriteJob`: copies the tensors."""
        request = self._requested()
        self._content = own = content_of(request.weights, self._format)
        if self._agreement.is_first and request.files is not None:
            self._files = read_files(request.files)
        state = {_ROOT: own.tensors}
        taking = Taking(step=request.version, state=state, float_dtype=self._format.dtype)
        self._snapshot = self._stager.begin(taking).finish()
        files = {name: digest(data) for name, data in sorted(own.files.items())}
        return {"version": request.version, "kind": own.kind, "files": files, "missing_ok": request.is_missing_ok}

    def admit(self, *, is_retry: bool) -> None:
        """See `WriteJob`.

        Raises:
            StaleVersionError: The version is not newer than every existing one.
            PublishError: An engine does not apply a feature of the adapter, as far as this rank has it.
        """
        del is_retry
        own, version = self._own(), self._requested().version
        if own.kind == "adapter":
            self._check_features(features_of(json.loads(own.files[CONFIG_NAME]), own.tensors))
        versions = self._directory.numbers()
        if versions and version <= versions[-1]:
            raise StaleVersionError(
                f"expected a version after {versions[-1]}, which was published to {self._directory.root} before, got "
                f"{version}"
            )

    def take(self) -> TakenSnapshot:
        """See `WriteJob`."""
        assert self._snapshot is not None, "it was made"
        self._described = _described_by_name(self._snapshot.header)
        for value in self._described.values:
            raise PublishError("expected tensors alone, got something else", path=value.name.removeprefix(f"{_ROOT}."))
        # The kind decides the names of the files.
        return TakenSnapshot(self._described.structure, 0, _KINDS.index(self._own().kind))

    def header(self) -> bytes:
        """See `WriteJob`."""
        assert self._snapshot is not None, "it was taken"
        return msgspec.msgpack.encode(_Header(self._snapshot.header, self._own().renamed))

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """See `WriteJob`."""
        kind = self._own().kind
        decoded = [from_msgpack(header, _header_decoder) for header in headers]
        if self._format.names is not None:
            check_engine_names([each.renamed for each in decoded], self._format.names)
        described = [_described_by_name(each.header) for each in decoded]
        max_file_bytes = self._format.max_shard_bytes if kind == "weights" else _ADAPTER_FILE_BYTES
        self._plan = make_plan(described, _ROOT, max_file_bytes=max_file_bytes, single_name=_SINGLE_NAMES[kind])
        if kind == "weights" and not self._requested().is_missing_ok:
            self._check_complete({name for each in described for item in each.items for name in item.names})
        return self._plan.rank_plans

    def digest(self, plan: RankPlan) -> bytes:
        """See `WriteJob`."""
        return msgspec.msgpack.encode([digest(self._bytes_of(self._described.items[at])) for at in plan.compared])

    def compare(self, digests: Sequence[bytes]) -> None:
        """See `WriteJob`."""
        by_rank = [from_msgpack(each, _digests_decoder) for each in digests]
        find_diverged(self._planned(), by_rank)

    def _write_files(self, directory: Path, plan: RankPlan) -> None:
        """Write the files on the first rank alone, so that the ranks need no shared disk."""

        def write() -> None:
            if self._agreement.is_first:
                self._write_all(directory, plan)
            else:
                self._send(plan)

        self._agreement.run("write", self._agreement.exchange.ending_on_failure(write))

    def _check_complete(self, names: Set[str]) -> None:
        """Refuse weights that lack names of the previous weights: engines load a part of a model without an error."""
        for number in reversed(self._directory.numbers()):
            before = self._directory.find(number)
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

    def _requested(self) -> ExportRequest:
        assert self._request is not None, "it is being exported"
        return self._request

    def _own(self) -> Content:
        assert self._content is not None, "it was taken"
        return self._content

    def _planned(self) -> SavePlan:
        assert self._plan is not None, "it was made"
        return self._plan

    def _bytes_of(self, item: WriteItem) -> memoryview:
        assert self._snapshot is not None, "it was taken"
        memory = self._snapshot.memory
        assert isinstance(memory, MemoryFile), "nothing of it is shared"
        return gathered(memory.data, item.piece) if item.piece is not None else memoryview(b"")

    # ------------------------------------------------------------------------------------------------------- writing

    def _send(self, plan: RankPlan) -> None:
        for batch in _batches(self._described.items, plan):
            self._agreement.exchange.send(b"".join(self._bytes_of(self._described.items[at]) for at, _, _ in batch), 0)
            self._agreement.check_others()

    def _write_all(self, directory: Path, plan: RankPlan) -> None:
        consolidation = self._planned().consolidation
        assert consolidation is not None, "it was asked for"
        create_consolidated(directory, consolidation, is_private=self._is_private)
        with ExitStack() as stack:
            descriptors = []
            for file in consolidation.files:
                descriptors.append(open_regular(directory / file.name, os.O_WRONLY))
                stack.callback(os.close, descriptors[-1])
            for at, file_number, start in plan.targets:
                item = self._described.items[at]
                write_box(descriptors[file_number], self._bytes_of(item), item, start)
            for rank in range(1, self._agreement.size):
                self._receive(rank, descriptors)
            for descriptor in descriptors:
                os.fsync(descriptor)
        self._write_other_files(directory, consolidation)

    def _receive(self, rank: int, descriptors: Sequence[int]) -> None:
        items = self._planned().described[rank].items
        for batch in _batches(items, self._planned().rank_plans[rank]):
            num_bytes = sum(items[at].num_bytes for at, _, _ in batch)
            data = memoryview(self._agreement.exchange.receive(num_bytes, rank))
            for at, file_number, start in batch:
                item = items[at]
                write_box(descriptors[file_number], data[: item.num_bytes], item, start)
                data = data[item.num_bytes :]
            self._agreement.check_others()

    def _write_other_files(self, directory: Path, consolidation: Consolidation) -> None:
        if len(consolidation.files) > 1:
            write_small(directory / INDEX_NAME, consolidation.index, is_private=self._is_private)
        for name, data in {**self._files, **self._own().files}.items():
            write_small(directory / name, data, is_private=self._is_private)


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
