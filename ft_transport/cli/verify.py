"""``ft-transport verify``: is all of it there, and is it what was written?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from ft_transport.cli.contents import Contents, NotFoundError, TensorEntry, UnreadableError
from ft_transport.cli.inspect import MANIFEST, OF_A_RANK, OURS, checkpoint_at, is_url, open_source
from ft_transport.cli.output import escape, megabytes
from ft_transport.cli.record_sums import Sums, find_damage
from ft_transport.cli.wholeness import DIGESTS, digest_troubles, file_troubles, tensor_troubles
from ft_transport.errors import (
    CheckpointDamagedError,
    FetchFailedError,
    IntegrityError,
    ManifestError,
)

_MAX_SHOWN: Final = 20
_MAX_CHARACTERS: Final = 500


def verify_command(
    thing: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="URL of a replica, safetensors file or directory, checkpoint, or DCP directory."
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
        if is_url(thing):
            contents = _of_peer(thing, timeout)
        else:
            contents = open_source(thing, with_places=True)
            troubles += _troubles(thing, contents, notes)
    except NotFoundError:
        raise
    except UnreadableError as error:
        troubles = [str(error)]
    except (FetchFailedError, IntegrityError, ManifestError) as error:
        troubles = [f"{type(error).__name__}: {error}"]
    if as_json:
        told = {"kind": contents.kind, "step": contents.step, "troubles": troubles, "notes": notes}
        typer.echo(msgspec.json.encode(told))
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


def _troubles(thing: str, contents: Contents, notes: list[str]) -> Iterator[str]:
    path = checkpoint_at(Path(thing))
    if contents.kind == OURS:
        yield from _of_ours(path)
        return
    notes += contents.notes
    is_of_ranks = path.is_dir() and any(path.glob(OF_A_RANK))
    if is_of_ranks and (path / MANIFEST).exists():
        yield from _of_renamed(path)
        return
    troubles = [*contents.troubles, *tensor_troubles(contents)]
    troubles += file_troubles(path, contents) if contents.form == "dcp" else ()
    if is_of_ranks:
        troubles.append(
            f"{path.name}: expected {MANIFEST}, which ft_transport writes last; the save was not finished, or it "
            "was lost, and nothing says what the bytes should be"
        )
    sums = Sums()
    if not troubles and contents.form == "dcp":
        troubles = [*find_damage(path, contents, sums)]
    yield from troubles
    if not troubles and DIGESTS in contents.metadata:
        try:
            yield from digest_troubles(path)
        except ManifestError as error:
            notes.append(f"its digests were not compared: {error.message}")
    elif not troubles:
        notes.append(_looked_at(sums))


def _looked_at(sums: Sums) -> str:
    if not sums.num_compared:
        return "its structure was checked; no digests are there to compare its bytes with"
    if not sums.num_without:
        return "its structure was checked, and all of its bytes compared with the CRC-32s of torch.save"
    return (
        f"its structure was checked; {sums.num_compared} of its parts were compared with the CRC-32s of torch.save, "
        f"{sums.num_without} have none"
    )


def _of_peer(url: str, timeout_s: float) -> Contents:
    """Receives all of a replica's newest snapshot, into nothing.

    Raises:
        TransportError: It cannot be asked, or is not what its digests say.
    """
    from ft_transport.cli.snapshot_files import settings_for_files
    from ft_transport.http.peer_address import PeerAddress
    from ft_transport.transfer.file_client import check_data

    peer = PeerAddress.from_url(url)
    manifest = check_data(peer, settings_for_files(timeout_s))
    entries = (
        TensorEntry(path=each.name, dtype=str(each.dtype), shape=tuple(each.shape), num_bytes=each.end - each.start)
        for each in manifest.tensors
    )
    return Contents(kind=f"snapshot of {peer}", tensors=tuple(entries), step=manifest.step)


def _of_ours(path: Path) -> Iterator[str]:
    from ft_transport import CheckpointStore

    step = int(path.resolve().name.removeprefix("step-"))
    with CheckpointStore(path.resolve().parent, read_only=True) as store:
        try:
            store.verify(step)
        except CheckpointDamagedError as error:
            yield f"{type(error).__name__}: {error}"


def _of_renamed(path: Path) -> Iterator[str]:
    """Compares the files of a checkpoint whose directory has another name than ``step-N``."""
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
        manifest = read_manifest(path, None, settings.trust(), retries)
        damaged = find_damage(path, manifest.files, manifest.hash, retries, lambda: None)
        if not damaged:
            decode_rank_files(read_rank_files(path, manifest, retries), manifest)
        yield from damaged
    except CheckpointDamagedError as error:
        yield f"{type(error).__name__}: {error}"
