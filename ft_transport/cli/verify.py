"""``ft-transport verify``: is a snapshot, a file or a checkpoint complete, and is it what was written?"""

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
    from ft_transport.wire.manifest import Manifest

_MAX_SHOWN: Final = 20
_MAX_CHARACTERS: Final = 500
DIGESTS: Final = "ft_transport.digests"
"""In the metadata of a snapshot's file."""
_BLOCK_BYTES: Final = 1 << 20
"""Length of one read."""
_BEFORE_ZIP: Final = b"\x80\x02\x8a\x0a"
"""The first bytes of the format before torch 1.6, which ``torch.save`` can still write: a pickled magic number."""

_Found: TypeAlias = "tuple[list[str], bool | None]"
"""The damages, and whether the records have checksums (``None``: unknown)."""


def verify_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="URL of a replica, safetensors file or directory, checkpoint, or DCP directory."
        ),
    ],
    timeout: Annotated[
        float, typer.Option(help="Give up a replica from which nothing comes for so many seconds.", min=0.1, max=1e6)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON.")] = False,
) -> None:
    """Look whether a replica's snapshot, a file or a checkpoint is whole.

    A snapshot is received, kept nowhere, and each chunk compared with its digest; so is a file that ``fetch`` has
    written, and, file by file, a checkpoint of ours. Other safetensors files have no digests: it is looked whether the
    library opens them, and whether they have what their index says. Of a DCP checkpoint it is looked whether each
    tensor is all there, each element once, and each record is compared with its CRC-32 if torch has written one. Exits
    with 1 if something is wrong, with 2 if there is nothing to look at.
    """
    contents, notes, troubles = Contents(kind=""), list[str](), list[str]()
    try:
        if is_url(target):
            contents = _of_peer(target, timeout)
        else:
            # A job may complete another checkpoint in the same directory meanwhile.
            path = checkpoint_at(Path(target))
            contents = open_source(str(path), with_places=True)
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
        yield from _of_ours(path.resolve(), contents.step)
        return
    notes += contents.notes
    troubles = [*contents.troubles, *tensor_troubles(contents)]
    troubles += file_troubles(path, contents) if contents.form == "dcp" else ()
    if is_of_ranks:
        troubles.append(
            f"{path.name}: expected {MANIFEST}, which ft_transport writes last; the save was not finished, or it "
            "was lost, and nothing says what the bytes should be"
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
        notes.append(_looked_at(sums))


def _looked_at(sums: RecordSums) -> str:
    if not sums.num_compared:
        return "its structure was checked; no digests are there to compare its bytes with"
    if not sums.num_without:
        return "its structure was checked, and all of its bytes compared with the CRC-32s of torch.save"
    return (
        f"its structure was checked; {sums.num_compared} of its parts were compared with the CRC-32s of torch.save, "
        f"{sums.num_without} have none"
    )


def _of_peer(url: str, timeout_s: float) -> Contents:
    """Receive all of a replica's newest snapshot without storing it.

    Raises:
        TransportError: It cannot be asked, or is not what its digests say.
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


def _of_ours(path: Path, step: int | None) -> list[str]:
    """Compare the files of a checkpoint of ours with its manifest, of any step without ``step``.

    Raises:
        NotFoundError: Another process deleted or replaced the checkpoint.
    """
    from ft_transport import StoreSettings
    from ft_transport.checkpoint.stored_files import (
        ReadRetries,
        decode_rank_files,
        find_damage,
        read_manifest,
        read_rank_files,
    )

    settings, begun = StoreSettings(), path.stat()
    retries = ReadRetries(settings.retry_s)
    try:
        manifest = read_manifest(path, step, settings.trust(), retries)
        troubles = find_damage(path, manifest.files, manifest.hash, retries, lambda: None)
        if not troubles:
            decode_rank_files(read_rank_files(path, manifest, retries), manifest)
    except (CheckpointDamagedError, OSError) as error:
        troubles = [f"{type(error).__name__}: {error}"]
    if troubles and not (path.exists() and os.path.samestat(begun, path.stat())):
        raise NotFoundError(f"expected a checkpoint that stays while it is read, {path} was deleted or replaced")
    return troubles


def tensor_troubles(contents: Contents) -> Iterator[str]:
    """Yield tensors with gaps or overlaps, and parts in a DCP checkpoint that are shorter than their elements."""
    for tensor in contents.tensors:
        name = escape(tensor.path)
        gap = find_gap(tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces])
        if gap:
            yield f"{name}: {gap}"
        for piece in tensor.pieces if contents.form == "dcp" else ():
            num_bytes = math.prod(piece.sizes) * ITEM_BITS[tensor.dtype] // 8
            if num_bytes and piece.stored is None:
                yield f"{name}: its part at {list(piece.offsets)} is nowhere stored"
            elif piece.stored is not None and not piece.stored.is_zstd and piece.stored.num_bytes < num_bytes:
                yield (
                    f"{name}: {tensor.dtype} of {list(piece.sizes)} takes {num_bytes} bytes, {piece.stored.num_bytes} "
                    "are stored"
                )


def file_troubles(path: Path, contents: Contents) -> Iterator[str]:
    """Yield parts of a DCP checkpoint that exceed their files or overlap, and files that are missing."""
    parts = [piece.stored for tensor in contents.tensors for piece in tensor.pieces] + [*contents.values.values()]
    by_file: dict[str, set[tuple[int, int]]] = {}
    for part in filter(None, parts):
        # Bytes that two names share are stored once.
        by_file.setdefault(part.file, set()).add((part.start, part.num_bytes))
    for name, places in by_file.items():
        shown = escape(name)
        try:
            file = StoredFile.at(path_in(path, name))
        except UnreadableError as error:
            yield f"{shown}: {error.message}"
            continue
        num_bytes = file.num_bytes
        file.close()
        end = 0
        for start, length in sorted(places):
            if start < 0 or length < 0 or start + length > num_bytes:
                yield f"{shown}: bytes [{start}, {start + length}) are not in its {num_bytes} bytes"
            elif start < end and length:
                yield f"{shown}: bytes [{start}, {start + length}) lie over others, which end at {end}"
            end = max(end, start + length)


def digest_troubles(path: Path) -> Iterator[str]:
    """Compare the chunks of a file that ``fetch`` has written with their digests.

    Raises:
        ManifestError: They cannot be compared: the job token is missing, or it is no such file.
    """
    from ft_transport.http.client.manifests import find_damaged
    from ft_transport.runtime.regular_files import read_pieces
    from ft_transport.settings import default_num_threads

    with contextlib.closing(StoredFile.at(path)) as file:
        manifest = read_manifest(file)
        if manifest.digests is None:
            raise ManifestError("expected digests, they were to come later")

        def views(start: int, end: int) -> Iterator[memoryview]:
            return read_pieces(file.descriptor, manifest.header_bytes + start, manifest.header_bytes + end)

        for chunk in find_damaged(manifest, views, num_threads=default_num_threads()):
            start, end = manifest.chunks.range_of(chunk, chunk + 1)
            yield f"{escape(path.name)}: bytes [{start}, {end}) of the data differ from their digest"


def read_manifest(file: StoredFile) -> Manifest:
    """Return the manifest in a file that ``fetch`` has written.

    Raises:
        ManifestError: There is none, or it has digests of a job token that this process does not have.
    """
    from ft_transport.settings import TransportSettings
    from ft_transport.wire.manifest import MAX_HEADER_BYTES, decode_header

    keys = TransportSettings().keys()
    num_bytes = min(int.from_bytes(file.read(0, 8), "little"), MAX_HEADER_BYTES)
    return decode_header(file.read(8, num_bytes), keys=keys.current() if keys is not None else ())


class RecordSums:
    """Compares the data files of a DCP checkpoint with the CRC-32s that ``torch.save`` writes for its records.

    Attributes:
        num_compared: Number of stored parts that were compared.
        num_without: Number of stored parts without CRC-32s.
    """

    def __init__(self) -> None:
        self.num_compared = self.num_without = 0
        self._is_stopped = False

    def damages(self, path: Path, contents: Contents) -> Iterator[str]:
        """Yield broken envelopes, and records that differ from their sums, of a checkpoint's directory."""
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
                # Expands one part at a time.
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
                raise UnreadableError("expected a file that does not change meanwhile, it became shorter")
            crc = zlib.crc32(buffer[:num_bytes], crc)
            start += num_bytes
        return crc
