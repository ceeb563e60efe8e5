"""One version, from the tensors of all ranks to files on disk: every rank gives its parts, the first one writes them.

Each byte comes from one rank that has it, and what several have is compared first. The phases are voted on
(``coordination.consensus``), so that a failure on one rank is the same error on all. After the last vote the ranks are
free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import Struct

from ft_transport.checkpoint.consolidated import INDEX_NAME, MAX_FILE_BYTES, Consolidation, create, put
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.save_plan import RankPlan, SavePlan, find_diverged, make_plan
from ft_transport.checkpoint.write_items import Described, WriteItem, describe
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.exchange import Exchange
from ft_transport.errors import PublishError
from ft_transport.publish.engines.engine import Kind
from ft_transport.publish.versions import VersionDirectory
from ft_transport.state.dtensors import is_dtensor
from ft_transport.state.snapshot import Snapshot
from ft_transport.state.stager import Stager
from ft_transport.state.views import has_own_memory
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.integrity import digest
from ft_transport.wire.manifest import Manifest, decode_header
from ft_transport.wire.served import MemoryFile
from ft_transport.wire.strided import gathered

_ROOT: Final = "weights"
_BATCH_BYTES: Final = 32 << 20
_MAX_FILE_BYTES: Final = {"adapter": 1 << 62, "weights": MAX_FILE_BYTES}
_SINGLE_NAMES: Final = {"adapter": "adapter_model.safetensors", "weights": "model.safetensors"}


@dataclass(frozen=True, slots=True)
class Content:
    """What a version consists of on this rank.

    Attributes:
        kind: What it is.
        tensors: By name; whole tensors, or DTensors of which each rank has a part.
        files: What else lies in the directory, by name.
    """

    kind: Kind
    tensors: Mapping[str, object]
    files: Mapping[str, bytes]


class _Common(Struct, frozen=True, array_like=True):
    """What all ranks have to say alike."""

    version: int
    kind: str
    files: int


class _Assigned(Struct, frozen=True, array_like=True):
    """A rank's share, and whether any rank has something to compare."""

    share: RankPlan
    is_compared: bool


class Exporter:
    """Exports versions. All ranks call it alike, on the training thread.

    Args:
        agreement: Of the group, for this alone.
        exchange: Of the group, for this alone.
        directory: Used on the first rank alone.
        num_threads: That copy.
    """

    def __init__(
        self, agreement: Agreement, exchange: Exchange, directory: VersionDirectory, *, num_threads: int
    ) -> None:
        self._agreement = agreement
        self._exchange = exchange
        self._directory = directory
        self._stager = Stager(max_snapshots=1, num_threads=num_threads, chunk_bytes=CHUNK_BYTES, is_digested=False)

    def export(self, version: int, content: Callable[[], Content]) -> Path:
        """Writes a version. Returns its directory, complete and on disk.

        Args:
            version: Its number.
            content: Makes what this rank has of it.

        Raises:
            TransportError: A rank failed; the same error on all.
        """
        export = _Export(version, self._agreement, self._exchange, self._directory)
        try:
            return export.run(content, self._stager)
        except BaseException:
            self._exchange.reset(self._agreement.sequence)
            if self._agreement.is_first:
                self._directory.discard(version)
            raise
        finally:
            export.close()

    def close(self) -> None:
        """Frees the memory."""
        self._stager.close()


class _Export:
    def __init__(self, version: int, agreement: Agreement, exchange: Exchange, directory: VersionDirectory) -> None:
        self._version = version
        self._agreement = agreement
        self._exchange = exchange
        self._directory = directory
        self._content: Content | None = None
        self._snapshot: Snapshot | None = None
        self._described = Described()
        self._plan: SavePlan | None = None

    def run(self, content: Callable[[], Content], stager: Stager) -> Path:
        agreement, run_on_all_ranks = self._agreement, self._agreement.run_on_all_ranks
        of = f"version {self._version}"
        begun = agreement.on_first(f"begin {of}", lambda: str(self._directory.begin(self._version)).encode())
        said = run_on_all_ranks(f"take {of}", lambda: self._take(content, stager))
        self._check_common([msgspec.msgpack.decode(each, type=_Common) for each in said])
        headers = self._gathered(f"gather the headers of {of}", self._header)
        agreement.on_first(f"plan {of}", lambda: self._make_plan(headers()))
        assigned = self._divide(of)
        if assigned.is_compared:
            self._compare(of, assigned.share)
        directory = Path(begun.decode())
        run_on_all_ranks(
            f"write {of}", self._exchange.ending_on_failure(lambda: self._write(directory, assigned.share))
        )
        final = agreement.on_first(f"commit {of}", lambda: str(self._directory.commit(self._version)).encode())
        return Path(final.decode())

    def close(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close()

    def _take(self, content: Callable[[], Content], stager: Stager) -> bytes:
        self._content = own = content()
        self._snapshot = stager.begin(self._version, {_ROOT: _untied(own.tensors)}).finish()
        self._described = describe([_manifest_of(self._header())], 0)
        for value in self._described.values:
            raise PublishError("expected tensors alone, got something else", path=value.name.removeprefix(f"{_ROOT}."))
        files = msgspec.json.encode(sorted((name, digest(data)) for name, data in own.files.items()))
        return msgspec.msgpack.encode(_Common(self._version, own.kind, digest(files)))

    def _header(self) -> bytes:
        assert self._snapshot is not None, "it was taken"
        return self._snapshot.header

    def _check_common(self, said: Sequence[_Common]) -> None:
        for rank, each in enumerate(said):
            if each != said[0]:
                # The same on all ranks, since all have heard the same.
                raise PublishError(f"expected all ranks to publish the same, got {said[0]} on rank 0, {each} on {rank}")

    def _gathered(self, phase: str, data: Callable[[], bytes]) -> Callable[[], list[bytes]]:
        found: list[bytes] | None = None

        def gather() -> None:
            nonlocal found
            found = self._exchange.gather(data())

        self._agreement.run_on_all_ranks(phase, self._exchange.ending_on_failure(gather))
        return lambda: found or []

    def _make_plan(self, headers: Sequence[bytes]) -> None:
        described = [describe([_manifest_of(header)], 0) for header in headers]
        assert self._content is not None, "it was taken"
        kind = self._content.kind
        self._plan = make_plan(described, _ROOT, max_file_bytes=_MAX_FILE_BYTES[kind], single_name=_SINGLE_NAMES[kind])

    def _divide(self, of: str) -> _Assigned:
        own = b""

        def scatter() -> None:
            nonlocal own
            shares: list[bytes] | None = None
            if self._plan is not None:
                is_compared = any(share.compared for share in self._plan.shares)
                shares = [msgspec.msgpack.encode(_Assigned(share, is_compared)) for share in self._plan.shares]
            own = self._exchange.scatter(shares)

        self._agreement.run_on_all_ranks(f"divide {of}", self._exchange.ending_on_failure(scatter))
        return msgspec.msgpack.decode(own, type=_Assigned)

    def _compare(self, of: str, share: RankPlan) -> None:
        """What several ranks have must be the same."""
        gathered_digests = self._gathered(
            f"compare {of}",
            lambda: msgspec.msgpack.encode(
                [digest(self._bytes_of(self._described.items[at])) for at in share.compared]
            ),
        )

        def compare() -> None:
            assert self._plan is not None, "it was made"
            find_diverged(self._plan, [msgspec.msgpack.decode(each, type=list[int]) for each in gathered_digests()])

        self._agreement.on_first(f"compare {of}", compare)

    def _bytes_of(self, item: WriteItem) -> memoryview:
        assert self._snapshot is not None, "it was taken"
        memory = self._snapshot.memory
        assert isinstance(memory, MemoryFile), "nothing of it is shared"
        return gathered(memory.data, item.piece) if item.piece is not None else memoryview(b"")

    # ------------------------------------------------------------------------------------------------------- writing

    def _write(self, directory: Path, share: RankPlan) -> None:
        if not self._agreement.is_first:
            for batch in _batches(self._described.items, share):
                data = b"".join(self._bytes_of(self._described.items[at]) for at, _, _ in batch)
                self._exchange.send(data, 0)
                self._agreement.check_others()
            return
        assert self._plan is not None, "it was made"
        consolidation = self._plan.consolidation
        assert consolidation is not None, "it was asked for"
        create(directory, consolidation)
        with ExitStack() as stack:
            descriptors = []
            for file in consolidation.files:
                descriptors.append(os.open(directory / file.name, os.O_WRONLY | os.O_CLOEXEC))
                stack.callback(os.close, descriptors[-1])
            for at, file_number, start in share.targets:
                item = self._described.items[at]
                put(descriptors[file_number], self._bytes_of(item), item, start)
            for rank in range(1, self._agreement.size):
                self._receive(rank, descriptors)
            for descriptor in descriptors:
                os.fsync(descriptor)
        self._write_other_files(directory, consolidation)

    def _receive(self, rank: int, descriptors: Sequence[int]) -> None:
        assert self._plan is not None, "it was made"
        items = self._plan.described[rank].items
        for batch in _batches(items, self._plan.shares[rank]):
            data = memoryview(self._exchange.receive(sum(items[at].num_bytes for at, _, _ in batch), rank))
            for at, file_number, start in batch:
                item = items[at]
                put(descriptors[file_number], data[: item.num_bytes], item, start)
                data = data[item.num_bytes :]
            self._agreement.check_others()

    def _write_other_files(self, directory: Path, consolidation: Consolidation) -> None:
        assert self._content is not None, "it was taken"
        if len(consolidation.files) > 1:
            write_small(directory / INDEX_NAME, consolidation.index)
        for name, data in self._content.files.items():
            write_small(directory / name, data)


def _untied(tensors: Mapping[str, object]) -> dict[str, object]:
    """The same with a copy of what shares memory with another: in the files each name has bytes of its own."""
    taken: set[tuple[torch.device, int]] = set()
    untied: dict[str, object] = {}
    for name, value in tensors.items():
        local = value.to_local() if is_dtensor(value) else value
        if has_own_memory(local) and local.numel():
            key = (local.device, local.untyped_storage().data_ptr())
            if key in taken and not is_dtensor(value):
                untied[name] = local.detach().clone()
                continue
            taken.add(key)
        untied[name] = value
    return untied


def _batches(items: Sequence[WriteItem], share: RankPlan) -> Iterator[list[tuple[int, int, int]]]:
    """What is sent at once, which both sides know."""
    batch: list[tuple[int, int, int]] = []
    num_bytes = 0
    for target in share.targets:
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
    """The description in the beginning of a safetensors file."""
    length = int.from_bytes(header[:8], "little")
    return decode_header(header[8 : 8 + length])
