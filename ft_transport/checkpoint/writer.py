"""The program of a writer process, which writes one rank's part of a checkpoint.

The trainer passes the number of a descriptor: one of two connected sockets. Over this socket, the writer receives
requests, and the descriptors of memory with snapshots. The writer imports torch only if the state has a value that only
torch can encode (``saved_values``). It exits when the trainer closes the other socket, so it does not outlive the
trainer.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ft_transport.checkpoint.dcp_metadata import DCP_METADATA_NAME, encode_dcp_metadata
from ft_transport.checkpoint.digested_file import DigestedFile, digested, write_small
from ft_transport.checkpoint.files import CheckpointFiles, files_at
from ft_transport.checkpoint.manifest import (
    CHECKSUM,
    FORMAT_VERSIONS,
    NOT_HERE,
    CheckpointManifest,
    HashName,
    data_file_name,
    encode_manifest,
    encode_rank_file,
    rank_file_name,
)
from ft_transport.checkpoint.plan import (
    INDEX_NAME,
    OWN_STATE_ADVICE,
    RankPlan,
    SavePlan,
    create_consolidated,
    find_diverged,
    make_plan,
    write_box,
)
from ft_transport.checkpoint.saved_values import encode_value
from ft_transport.checkpoint.shared_files import (
    ItemDigest,
    ItemForm,
    StoredDataFile,
    StoredItem,
    StoredItems,
    form_of,
)
from ft_transport.checkpoint.torch_save import envelope_of
from ft_transport.checkpoint.write_items import SHARED, Described, Describer, WriteItem, describe
from ft_transport.checkpoint.writer_process import (
    Bytes,
    Compare,
    Create,
    Describe,
    Digest,
    Done,
    Drop,
    Failed,
    Plan,
    RankPlans,
    Reread,
    Take,
    Taken,
    Write,
    WriterAnswer,
    WriterRequest,
    Written,
    receive_request,
    send,
)
from ft_transport.coordination.votes import AbandonedError
from ft_transport.coordination.votes import describe as describe_failure
from ft_transport.errors import ReplicasDivergedError, RestoreError
from ft_transport.runtime.regular_files import open_regular
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import Manifest, decode_header
from ft_transport.wire.merging import merge_trees
from ft_transport.wire.snapshot import gathered

_NICENESS: Final = 5
"""Lowers the priority of the writer, so that training gets the cores first."""
_DIGEST_BYTES: Final = 8
_MIN_UNCHANGED_BYTES: Final = 64 << 10
"""Fewer bytes of unchanged items are not worth a data file of their own."""

_written_decoder: Final = msgspec.msgpack.Decoder(Written)


class Writer:
    """Performs the requests of a trainer: plans, digests and writes its snapshots.

    Args:
        check: Called repeatedly during writes; an error that it raises ends the write.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._rank = 0
        self._hash_name: HashName = CHECKSUM
        self._headers: list[bytes] = []
        self._manifests: list[Manifest] = []
        self._data: list[memoryview] = []
        self._describer = Describer()
        self._described = Described()
        self._plan: SavePlan | None = None
        self._dcp_metadata: tuple[list[list[tuple[str, int, int]]], bytes] | None = None
        self._stored = StoredItems({}, {})

    def perform(self, request: WriterRequest, descriptors: list[int]) -> WriterAnswer:
        """Perform a request, close its descriptors, and return the answer.

        Raises:
            Exception: The request failed. The caller reports this error to the trainer.
        """
        match request:
            case Take():
                return self._take(request, descriptors)
            case Drop():
                self.drop()
                return Done()
            case Plan():
                return self._make_plan(request)
            case Create():
                return self._create(Path(request.directory))
            case Reread():
                return self._reread(Path(request.directory), request.names)
            case Digest():
                return Bytes(b"".join(self._digest(self._described.items[at]) for at in request.items))
            case Compare():
                return self._compare(request)
            case Write():
                return self._write(request)
            case Describe():
                return self._describe(request)

    def drop(self) -> None:
        """Unmap the snapshots."""
        self._manifests.clear()
        self._headers.clear()
        self._described = Described()
        # The system unmaps a snapshot when its last memoryview is deleted.
        self._data.clear()

    def _take(self, request: Take, descriptors: list[int]) -> Taken:
        self.drop()
        self._rank = request.rank
        self._hash_name = request.hash_name
        try:
            for descriptor, start, num_bytes in zip(descriptors, request.starts, request.num_bytes, strict=True):
                begin = start - start % mmap.ALLOCATIONGRANULARITY
                mapping = mmap.mmap(descriptor, start + num_bytes - begin, offset=begin, prot=mmap.PROT_READ)
                whole = memoryview(mapping)[start - begin :]
                header_bytes = int.from_bytes(whole[:8], "little")
                self._headers.append(bytes(whole[8 : 8 + header_bytes]))
                self._manifests.append(decode_header(self._headers[-1]))
                self._data.append(whole[8 + header_bytes :])
                whole.release()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._described = self._describer.describe(self._manifests, self._rank)
        return Taken(self._described.structure, self._described.shared_values())

    def _make_plan(self, request: Plan) -> RankPlans:
        manifests = [tuple(decode_header(header) for header in headers) for headers in request.headers]
        names = [f"rank {rank}" for rank in range(len(manifests))]
        try:
            # Compares only leaves without stored bytes. The writer later compares the digests of stored bytes.
            merge_trees(
                [each[SHARED].tree for each in manifests],
                merge_tensor=lambda _path, _sources, nodes: nodes[0],
                merge_stored=lambda _path, _source, node: node,
                names=names,
            )
        except RestoreError as error:
            what = error.message.rsplit("; ", 1)[0]
            raise ReplicasDivergedError(f"{what}; {OWN_STATE_ADVICE}", path=error.path) from error
        self._dcp_metadata = None
        described = [describe(each, rank) for rank, each in enumerate(manifests)]
        self._plan = make_plan(described, request.consolidated)
        return RankPlans(tuple(self._plan.rank_plans))

    def _create(self, directory: Path) -> Done:
        consolidation = self._planned.consolidation
        assert consolidation is not None, "the trainer sends Create only if the plan has consolidated files"
        create_consolidated(directory, consolidation)
        return Done()

    def _reread(self, directory: Path, names: tuple[str, ...]) -> Written:
        each = (digested(directory / name, self._check, hash_name=self._hash_name) for name in names)
        return Written(tuple(each), (), {})

    def _compare(self, request: Compare) -> Done:
        find_diverged(
            self._planned,
            [
                [int.from_bytes(each[at : at + _DIGEST_BYTES], "big") for at in range(0, len(each), _DIGEST_BYTES)]
                for each in request.digests
            ],
        )
        return Done()

    @property
    def _planned(self) -> SavePlan:
        assert self._plan is not None, "the trainer sends Plan before any request that needs the plan"
        return self._plan

    def _digest(self, item: WriteItem) -> bytes:
        return digest(self._bytes_of(item)).to_bytes(_DIGEST_BYTES, "big")

    def _bytes_of(self, item: WriteItem) -> memoryview:
        piece = item.piece
        if piece is None:
            return memoryview(b"")
        return gathered(self._data[item.part], piece)

    def _write(self, request: Write) -> Written:
        target, plan = files_at(request.location), request.plan
        self._check()
        digests = self._digest_items(plan)
        shared = StoredItems({}, {})
        if request.last:
            # After a failed write, few files of `_stored` are in the last checkpoint; the others are not found there.
            shared = self._stored.share_unchanged(digests, request.last, target)
        stored = dict(shared.items)
        files = dict(shared.files)
        names = (name for number in itertools.count() if (name := data_file_name(self._rank, number)) not in files)
        written = [at for at in plan.items if self._form_of(at) not in stored]
        unchanged = [at for at in written if self._is_unchanged(at, digests)]
        if sum(self._described.items[at].num_bytes for at in unchanged) >= _MIN_UNCHANGED_BYTES:
            name = next(names)
            with self._data_file(target, name) as file:
                stored.update(self._append(file, name, at, digests) for at in unchanged)
                files[name] = StoredDataFile.of(target, file.finish())
        name = next(names)
        with self._data_file(target, name) as file:
            stored.update(self._append(file, name, at, digests) for at in written if self._form_of(at) not in stored)
            values = [self._append_value(file, name, at) for at in plan.values]
            files[name] = StoredDataFile.of(target, file.finish())
        self._stored = StoredItems(files, stored)
        self._put_consolidated(request.location, plan)
        # If the trainer has died, its successor may already write to a directory of the same name.
        self._check()
        description = self._describe_rank(plan)
        description_file = write_small(target, rank_file_name(self._rank), description, hash_name=self._hash_name)
        target.sync()
        numbers = {name: number for number, name in enumerate(files)}
        items = (stored[self._form_of(at)] for at in plan.items)
        places = [*((item.file, item.start, item.num_bytes) for item in items), *values]
        return Written(
            (*(each.entry for each in files.values()), description_file),
            tuple((numbers[name], start, num_bytes) for name, start, num_bytes in places),
            dict(target.shared),
        )

    def _digest_items(self, plan: RankPlan) -> dict[ItemForm, ItemDigest]:
        digests: dict[ItemForm, ItemDigest] = {}
        for at in plan.items:
            form = self._form_of(at)
            digests[form] = ItemDigest.of(self._bytes_of(self._described.items[at]), self._stored.digest_of(form))
            self._check()
        return digests

    def _is_unchanged(self, at: int, digests: dict[ItemForm, ItemDigest]) -> bool:
        form = self._form_of(at)
        return digests[form].equals(self._stored.digest_of(form))

    def _form_of(self, at: int) -> ItemForm:
        return form_of(self._described.items[at])

    def _data_file(self, target: CheckpointFiles, name: str) -> DigestedFile:
        return DigestedFile(target, name, self._check, hash_name=self._hash_name)

    def _append(
        self, file: DigestedFile, name: str, at: int, digests: dict[ItemForm, ItemDigest]
    ) -> tuple[ItemForm, StoredItem]:
        """Append an item to a data file, and return its form and its place."""
        item, form = self._described.items[at], self._form_of(at)
        before = after = b""
        if item.names:
            before, after = envelope_of(item.dtype, item.shape, item.num_bytes)
        start = file.position
        file.write(before, self._bytes_of(item), after)
        return form, StoredItem(digests[form], name, start, file.position - start, start + len(before))

    def _append_value(self, file: DigestedFile, name: str, at: int) -> tuple[str, int, int]:
        """Append a value to a data file, and return its place."""
        value = self._described.values[at]
        start = file.position
        file.write(encode_value(value.node, self._manifests[value.part], self._data[value.part]))
        return name, start, file.position - start

    def _describe_rank(self, plan: RankPlan) -> bytes:
        """Return the content of ``rank-K.json``."""
        numbers = {name: number for number, name in enumerate(self._stored.files)}
        positions = [[NOT_HERE] * len(manifest.tensors) for manifest in self._manifests]
        files = [[0] * len(manifest.tensors) for manifest in self._manifests]
        for at in plan.items:
            item = self._described.items[at]
            if item.is_entry:
                place = self._stored.items[self._form_of(at)]
                positions[item.part][item.entry] = place.data_start
                files[item.part][item.entry] = numbers[place.file]
        return encode_rank_file(list(numbers), self._headers, positions, files)

    def _put_consolidated(self, directory: str, plan: RankPlan) -> None:
        for number, name in enumerate(plan.files):
            targets = [(at, start) for at, file, start in plan.targets if file == number]
            if not targets:
                continue
            descriptor = open_regular(Path(directory) / name, os.O_WRONLY)
            try:
                for at, start in targets:
                    self._check()
                    item = self._described.items[at]
                    if item.num_bytes:
                        write_box(descriptor, self._bytes_of(item), item, start)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _describe(self, request: Describe) -> Bytes:
        target = files_at(request.location)
        written, reread = (
            [_written_decoder.decode(each) for each in some] for some in (request.written, request.reread)
        )
        places = [
            [(each.files[file].name, start, num_bytes) for file, start, num_bytes in each.places] for each in written
        ]
        # Reuse the encoded metadata if no place has changed: encoding 10,000 tensors takes half a second.
        if self._dcp_metadata is None or self._dcp_metadata[0] != places:
            self._dcp_metadata = (places, encode_dcp_metadata(self._planned, places))
        files = [write_small(target, DCP_METADATA_NAME, self._dcp_metadata[1], hash_name=self._hash_name)]
        if (consolidation := self._planned.consolidation) is not None:
            files.append(write_small(target, INDEX_NAME, consolidation.index, hash_name=self._hash_name))
        target.put_shared({name: path for each in written for name, path in each.shared.items()})
        manifest = CheckpointManifest(
            format=FORMAT_VERSIONS[self._hash_name],
            step=request.step,
            num_ranks=len(written),
            local_keys=request.local_keys,
            files=(*files, *(file for each in (*written, *reread) for file in each.files)),
            hash=self._hash_name,
            job=request.job,
        )
        return Bytes(encode_manifest(manifest))


def serve(connection: socket.socket) -> None:
    """Perform requests one after the other until the trainer closes the connection."""

    def check() -> None:
        readable, _, _ = select.select([connection], [], [], 0)
        if readable:
            raise AbandonedError("gave up because another rank has failed, or the trainer has exited")

    writer = Writer(check)
    send(connection, Done())
    while (received := receive_request(connection)) is not None:
        request, descriptors = received
        answer: WriterAnswer
        try:
            answer = writer.perform(request, descriptors)
        except Exception as error:
            answer = Failed(describe_failure(error))
        send(connection, answer)
        if isinstance(request, Drop):
            gc.collect()


def main() -> None:
    """Run a writer process."""
    # Almost no object is part of a cycle, and the search for cycles would take longer than creating all objects.
    gc.disable()
    os.nice(_NICENESS)
    # Ignore an interrupt from the terminal: the trainer decides when its writer process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        serve(connection)
