"""``ft-transport verify``: checks that a snapshot, a file or a checkpoint is complete and undamaged."""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import typer

from ft_transport.cli.contents import (
    ITEM_BITS,
    Contents,
    NotFoundError,
    StoredPart,
    TensorEntry,
    UnreadableError,
    find_gap,
)
from ft_transport.cli.copy import is_bucket, local_copy
from ft_transport.cli.inspect import MANIFEST, OF_A_RANK, OURS, checkpoint_at, is_url, open_source
from ft_transport.cli.output import escape, megabytes
from ft_transport.cli.saved_tensor import start_of, zip_entries
from ft_transport.cli.stored_state import StoredFile, StoredState, path_in
from ft_transport.errors import (
    CheckpointDamagedError,
    FetchFailedError,
    IntegrityError,
    ManifestError,
)
from ft_transport.runtime.threads import SafeExecutor

if TYPE_CHECKING:
    from ft_transport.checkpoint.files import CheckpointFiles
    from ft_transport.wire.manifest import Manifest

_MAX_SHOWN: Final = 20
_MAX_CHARACTERS: Final = 500
DIGESTS: Final = "ft_transport.digests"
"""Metadata key of the digests in a file that ``fetch`` has written."""
_BLOCK_BYTES: Final = 1 << 20
"""Length of one read."""
_BEFORE_ZIP: Final = b"\x80\x02\x8a\x0a"
"""The first bytes of the format before torch 1.6, which ``torch.save`` can still write: a pickled magic number."""

_Found: TypeAlias = "tuple[list[str], bool | None]"
"""Descriptions of the damage in a stored part, and whether the part has checksums (``None``: unknown)."""


def verify_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="URL of a replica or a bucket, safetensors file or directory, checkpoint, or DCP directory.",
        ),
    ],
    timeout: Annotated[
        float, typer.Option(help="Fail if no data arrives from a replica for this many seconds.", min=0.1, max=1e6)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a replica's snapshot, a file or a checkpoint is complete and undamaged.

    A snapshot is received without storing it, and each chunk is compared with its digest. A file that ``fetch`` has
    written is compared with its digests too, and so is each file of a checkpoint of ft_transport. Other safetensors
    files have no digests: the command checks that the library can open them and that they match their index. In a DCP
    checkpoint it checks that each element of each tensor is stored once, and compares each record with its CRC-32 if
    torch has written one. Exits with 1 if a fault is found, with 2 if the target does not exist.
    """
    contents, notes, troubles = Contents(kind=""), list[str](), list[str]()
    try:
        if is_url(target):
            contents = _of_peer(target, timeout)
        elif is_bucket(target):
            with local_copy(target, with_data=False) as (path, found):
                contents = open_source(str(path))
            troubles += _of_ours(found.files, found.step)
        else:
            # Choose the checkpoint once: a job may complete a newer one in the directory during the check.
            path = checkpoint_at(Path(target))
            contents = open_source(str(path), with_positions=True)
            troubles += _troubles(path, contents, notes)
    except NotFoundError:
        raise
    except UnreadableError as error:
        troubles = [str(error)]
    except (FetchFailedError, IntegrityError, ManifestError) as error:
        troubles = [f"{type(error).__name__}: {error}"]
    if as_json:
        result = {"kind": contents.kind, "step": contents.step, "troubles": troubles, "notes": notes}
        typer.echo(msgspec.json.encode(result))
    elif troubles:
        for trouble in troubles[:_MAX_SHOWN]:
            typer.echo(f"✗ {escape(trouble, _MAX_CHARACTERS)}")
        if len(troubles) > _MAX_SHOWN:
            typer.echo(f"  and {len(troubles) - _MAX_SHOWN} more")
    else:
        at = f", step {contents.step}" if contents.step is not None else ""
        typer.echo(f"✓ {contents.kind}{at}: {len(contents.tensors)} tensors, {megabytes(contents.num_bytes)}")
        for note in notes:
            typer.echo(f"  {escape(note, _MAX_CHARACTERS)}")
    if troubles:
        raise typer.Exit(1)


def _troubles(path: Path, contents: Contents, notes: list[str]) -> Iterator[str]:
    is_of_ranks = path.is_dir() and any(path.glob(OF_A_RANK))
    if contents.kind == OURS or (is_of_ranks and (path / MANIFEST).exists()):
        yield from _of_directory(path.resolve(), contents.step)
        return
    notes += contents.notes
    troubles = [*contents.troubles, *tensor_troubles(contents)]
    troubles += file_troubles(path, contents) if contents.form == "dcp" else ()
    if is_of_ranks:
        troubles.append(
            f"{path.name}: expected {MANIFEST}, which ft_transport writes last; the save was not finished, or the file "
            "was lost; without it, the other files cannot be verified"
        )
    sums = RecordSums()
    if not troubles and contents.form == "dcp":
        troubles = [*sums.damages(path, contents)]
    yield from troubles
    if not troubles and DIGESTS in contents.metadata:
        try:
            yield from digest_troubles(path)
        except ManifestError as error:
            notes.append(f"its digests were not compared: {error.message}")
    elif not troubles:
        notes.append(_checks_made(sums))


def _checks_made(sums: RecordSums) -> str:
    if not sums.num_compared:
        return "only the structure was checked: the files have no digests to compare their bytes with"
    if not sums.num_without:
        return "the structure was checked, and all bytes were compared with the CRC-32s of torch.save"
    return (
        f"the structure was checked; {sums.num_compared} stored parts were compared with the CRC-32s of torch.save, "
        f"{sums.num_without} parts have none"
    )


def _of_peer(url: str, timeout_s: float) -> Contents:
    """Receive a replica's newest snapshot without storing it, compare its digests, and return its tensors.

    Raises:
        TransportError: The replica is unreachable, or the data differs from its digests.
    """
    from ft_transport.cli.snapshot_files import settings_for_files
    from ft_transport.http.peer_address import PeerAddress
    from ft_transport.transfer.files import check_data

    peer = PeerAddress.from_url(url)
    manifest = check_data(peer, settings_for_files(timeout_s))
    entries = (
        TensorEntry(path=each.name, dtype=str(each.dtype), shape=tuple(each.shape), num_bytes=each.end - each.start)
        for each in manifest.tensors
    )
    return Contents(kind=f"snapshot of {peer}", tensors=tuple(entries), step=manifest.step)


def _of_directory(path: Path, step: int | None) -> list[str]:
    """Compare a checkpoint of this package with its manifest.

    Args:
        path: The directory of the checkpoint.
        step: The step that the manifest must have; ``None`` for any.

    Raises:
        NotFoundError: Another process deleted or replaced the checkpoint during the comparison.
    """
    from ft_transport.checkpoint.files import files_at

    begun = path.stat()
    troubles = _of_ours(files_at(str(path)), step)
    if troubles and not (path.exists() and os.path.samestat(begun, path.stat())):
        raise NotFoundError(
            f"{path} was deleted or replaced while it was read; verify again, or verify another checkpoint"
        )
    return troubles


def _of_ours(files: CheckpointFiles, step: int | None) -> list[str]:
    """Compare the files of a checkpoint of this package with its manifest, and return the differences."""
    from ft_transport import StoreSettings
    from ft_transport.checkpoint.stored_files import (
        ReadRetries,
        decode_rank_files,
        find_damage,
        read_manifest,
        read_rank_files,
    )

    settings = StoreSettings()
    retries = ReadRetries(settings.retry_s)
    try:
        manifest = read_manifest(files, step, settings.trust(), retries)
        troubles = find_damage(files, manifest.files, manifest.hash, retries, lambda: None)
        if not troubles:
            decode_rank_files(read_rank_files(files, manifest, retries), manifest)
    except (CheckpointDamagedError, OSError) as error:
        troubles = [f"{type(error).__name__}: {error}"]
    return troubles


def tensor_troubles(contents: Contents) -> Iterator[str]:
    """Yield faults: tensors with gaps or overlaps, and parts in a DCP checkpoint that are too short."""
    for tensor in contents.tensors:
        name = escape(tensor.path)
        gap = find_gap(tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces])
        if gap:
            yield f"{name}: {gap}"
        for piece in tensor.pieces if contents.form == "dcp" else ():
            num_bytes = math.prod(piece.sizes) * ITEM_BITS[tensor.dtype] // 8
            if num_bytes and piece.stored is None:
                yield f"{name}: its part at {list(piece.offsets)} is not stored"
            elif piece.stored is not None and not piece.stored.is_zstd and piece.stored.num_bytes < num_bytes:
                yield (
                    f"{name}: {tensor.dtype} of {list(piece.sizes)} takes {num_bytes} bytes, but "
                    f"{piece.stored.num_bytes} are stored"
                )


def file_troubles(path: Path, contents: Contents) -> Iterator[str]:
    """Yield faults of a DCP checkpoint: parts that exceed their files or overlap, and missing files."""
    parts = [piece.stored for tensor in contents.tensors for piece in tensor.pieces] + [*contents.values.values()]
    by_file: dict[str, set[tuple[int, int]]] = {}
    for part in filter(None, parts):
        # Two names may share the same bytes, which are no overlap.
        by_file.setdefault(part.file, set()).add((part.start, part.num_bytes))
    for name, positions in by_file.items():
        shown = escape(name)
        try:
            file = StoredFile.at(path_in(path, name))
        except UnreadableError as error:
            yield f"{shown}: {error.message}"
            continue
        num_bytes = file.num_bytes
        file.close()
        end = 0
        for start, length in sorted(positions):
            if start < 0 or length < 0 or start + length > num_bytes:
                yield f"{shown}: a part is in bytes [{start}, {start + length}), but the file has {num_bytes} bytes"
            elif start < end and length:
                yield f"{shown}: a part in bytes [{start}, {start + length}) overlaps another one, which ends at {end}"
            end = max(end, start + length)


def digest_troubles(path: Path) -> Iterator[str]:
    """Yield the chunks of a file that differ from their digests.

    Raises:
        ManifestError: The file has no digests, or its digests need a job token that this process lacks.
    """
    from ft_transport.http.client.manifests import find_damaged
    from ft_transport.runtime.regular_files import read_pieces

    with contextlib.closing(StoredFile.at(path)) as file:
        manifest = read_manifest(file)
        if manifest.digests is None:
            raise ManifestError("expected a file with digests, got one without digests")

        def views(start: int, end: int) -> Iterator[memoryview]:
            return read_pieces(file.descriptor, manifest.header_bytes + start, manifest.header_bytes + end)

        for chunk in find_damaged(manifest, views):
            start, end = manifest.chunks.range_of(chunk, chunk + 1)
            yield f"{escape(path.name)}: bytes [{start}, {end}) of the data differ from their digest"


def read_manifest(file: StoredFile) -> Manifest:
    """Return the manifest in a file that ``fetch`` has written.

    Raises:
        ManifestError: The file has no manifest, or its digests need a job token that this process lacks.
    """
    from ft_transport.settings import TransportSettings
    from ft_transport.wire.manifest import MAX_HEADER_BYTES, decode_header

    keys = TransportSettings().keys()
    num_bytes = min(int.from_bytes(file.read(0, 8), "little"), MAX_HEADER_BYTES)
    return decode_header(file.read(8, num_bytes), keys=keys.current() if keys is not None else ())


class RecordSums:
    """Compares the stored parts of a DCP checkpoint with the CRC-32s that ``torch.save`` writes.

    Attributes:
        num_compared: Number of stored parts that were compared.
        num_without: Number of stored parts without CRC-32s.
    """

    def __init__(self) -> None:
        self.num_compared = self.num_without = 0
        self._is_stopped = False

    def damages(self, path: Path, contents: Contents) -> Iterator[str]:
        """Yield the faults in a directory: damaged zip files, and records that differ from their CRC-32s."""
        with (
            StoredState(path, contents, takes_quantized=True) as state,
            SafeExecutor(2, "ft-transport-sum") as pool,
        ):
            try:
                for troubles, has_sums in [
                    each.result() if isinstance(each, Future) else each for each in self._begin(state, pool)
                ]:
                    self.num_compared += has_sums is True
                    self.num_without += has_sums is False
                    yield from troubles
            finally:
                self._is_stopped = True

    def _begin(self, state: StoredState, pool: SafeExecutor) -> list[_Found | Future[_Found]]:
        found: list[_Found | Future[_Found]] = []
        parts: dict[StoredPart | None, str] = {}
        for entry in state.contents.tensors:
            try:
                state.tensor(entry)
            except UnreadableError as error:
                found.append(([error.message], None))
                continue
            for piece in entry.pieces:
                parts.setdefault(piece.stored, entry.path)
        for name, part in state.contents.values.items():
            parts.setdefault(part, name)
        for part, name in parts.items():
            if part is None:
                continue
            try:
                file, at = state.located(part, name)
            except UnreadableError as error:
                found.append(([error.message], None))
                continue
            if part.is_zstd:
                # Compare at once, so that only one decompressed part needs space.
                found.append(self._compare(state, name, file, at))
                state.drop(part)
            else:
                found.append(pool.submit(self._compare, state, name, file, at))
        return found

    def _compare(self, state: StoredState, name: str, file: StoredFile, at: StoredPart) -> _Found:
        shown = f"{escape(at.file)}: {escape(name)}"
        try:
            read = state.reader(file, at)
            entries = zip_entries(read, at.num_bytes) if read(0, len(_BEFORE_ZIP)) != _BEFORE_ZIP else []
            if not any(entry.crc for entry in entries):
                return [], False
            troubles = []
            for entry in entries:
                start = at.start + start_of(entry, read, at.num_bytes)
                end = start + entry.num_bytes
                if self._crc_of(file, start, end) != entry.crc and not self._is_stopped:
                    troubles.append(
                        f"{shown}: its record {escape(entry.name)}, in bytes [{start}, {end}), differs from the CRC-32 "
                        "that torch.save has written"
                    )
            return troubles, True
        except (UnreadableError, OSError) as error:
            return [f"{shown}: {error}"], None

    def _crc_of(self, file: StoredFile, start: int, end: int) -> int:
        crc, buffer = 0, memoryview(bytearray(min(_BLOCK_BYTES, end - start)))
        while start < end and not self._is_stopped:
            num_bytes = os.preadv(file.descriptor, [buffer[: end - start]], start)
            if not num_bytes:
                raise UnreadableError(
                    "the file became shorter while it was read; verify it again when no process writes to it"
                )
            crc = zlib.crc32(buffer[:num_bytes], crc)
            start += num_bytes
        return crc
