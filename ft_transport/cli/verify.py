"""``ft-transport verify``: is all of it there, and is it what was written?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from ft_transport.cli.contents import Contents
from ft_transport.cli.inspect import OURS, checkpoint_at, open_thing
from ft_transport.errors import CheckpointDamagedError, TransportError, escape_peer_text
from ft_transport.telemetry.explain import megabytes

_MAX_SHOWN: Final = 20
_MAX_CHARACTERS: Final = 500


def verify_command(
    thing: Annotated[str, typer.Argument(help="URL of a replica, safetensors file, checkpoint, or DCP directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON.")] = False,
) -> None:
    """Look whether a replica's snapshot, a file or a checkpoint is whole.

    A snapshot is fetched and each chunk compared with its digest; so is a checkpoint of ours, file by file. Of
    safetensors files and DCP checkpoints, which have no digests, it is looked whether each tensor lies inside its file
    and none over another. Exits with 1 if something is wrong.
    """
    contents = open_thing(thing)
    troubles = list(_troubles(thing, contents))
    if as_json:
        typer.echo(msgspec.json.encode({"kind": contents.kind, "step": contents.step, "troubles": troubles}))
    elif troubles:
        for trouble in troubles[:_MAX_SHOWN]:
            typer.echo(f"✗ {escape_peer_text(trouble, max_characters=_MAX_CHARACTERS)}")
        if len(troubles) > _MAX_SHOWN:
            typer.echo(f"  and {len(troubles) - _MAX_SHOWN} more")
    else:
        at = f", step {contents.step}" if contents.step is not None else ""
        typer.echo(f"✓ {contents.kind}{at}: {len(contents.tensors)} tensors, {megabytes(contents.num_bytes)}")
    if troubles:
        raise typer.Exit(1)


def _troubles(thing: str, contents: Contents) -> Iterator[str]:
    if thing.startswith(("http://", "https://")):
        yield from _of_peer(thing)
        return
    path = checkpoint_at(Path(thing))
    if contents.kind == OURS:
        yield from _of_ours(path)
    else:
        yield from _of_parts(path, contents)


def _of_peer(url: str) -> Iterator[str]:
    from ft_transport import HTTPTransport, TransportSettings

    transport: HTTPTransport[object] = HTTPTransport(settings=TransportSettings(verify=True))
    try:
        transport.fetch(url)
    except TransportError as error:
        yield f"{type(error).__name__}: {error}"
    finally:
        transport.shutdown()


def _of_ours(path: Path) -> Iterator[str]:
    from ft_transport import CheckpointStore

    step = int(path.resolve().name.removeprefix("step-"))
    with CheckpointStore(path.resolve().parent, read_only=True) as store:
        try:
            store.verify(step)
        except CheckpointDamagedError as error:
            yield f"{type(error).__name__}: {error}"


def _of_parts(path: Path, contents: Contents) -> Iterator[str]:
    by_file: dict[str, list[tuple[int, int]]] = {}
    for part in contents.parts:
        by_file.setdefault(part.file, []).append((part.start, part.num_bytes))
    for name, parts in by_file.items():
        file = path / name if name else path
        if name and (Path(name).is_absolute() or ".." in Path(name).parts):
            yield f"{name}: lies outside of the checkpoint"
            continue
        try:
            num_bytes = os.stat(file).st_size - contents.data_start
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        end = 0
        for start, length in sorted(parts):
            if start < 0 or length < 0 or start + length > num_bytes:
                yield f"{name or path.name}: bytes [{start}, {start + length}) are not in its {num_bytes} bytes"
            elif start < end and length:
                yield f"{name or path.name}: bytes [{start}, {start + length}) lie over others, which end at {end}"
            end = max(end, start + length)
