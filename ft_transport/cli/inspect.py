"""``ft-transport inspect``: lists the tensors of a snapshot, file or checkpoint; opens them for other commands too."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from ft_transport.cli.contents import Contents, NotFoundError, TensorEntry, UnreadableError
from ft_transport.cli.copy import is_bucket, local_copy
from ft_transport.cli.dcp_metadata import METADATA_NAME, read_dcp
from ft_transport.cli.output import escape, megabytes
from ft_transport.cli.safetensors_files import INDEX_SUFFIX, SUFFIX, read_file, read_files, read_header

_STEP_DIRECTORY: Final = re.compile(r"step-([0-9]{1,18})")
_NUMBERED: Final = re.compile(r"(?:step|version)-([0-9]{1,18})")
"""Names of directories of checkpoints (of this package and of torchtitan) and of published versions."""
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MANIFEST: Final = "manifest.json"
OURS: Final = "checkpoint of ft_transport"
OF_A_RANK: Final = "rank-*.json"
"""Files that a checkpoint of this package has in addition to the files of DCP."""
_PEER_WITHIN_S: Final = 30.0


def inspect_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="URL of a replica, safetensors file or directory, checkpoint, directory or bucket of checkpoints, or "
            "DCP directory.",
        ),
    ],
    values: Annotated[bool, typer.Option("--values", help="List the names of other stored values too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the tensors of a replica's newest snapshot, of a file or of a checkpoint, without reading their data.

    DCP's metadata is a pickle; the command reads it without running its code. Exits with 1 if the target is unreadable
    or truncated, or contradicts its index.
    """
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(local_copy(target, with_data=False))[0] if is_bucket(target) else target
        contents = open_source(str(path))
    if as_json:
        typer.echo(msgspec.json.encode(_as_object(contents)))
    else:
        typer.echo(_as_text(contents, with_values=values))
    if contents.num_bytes_missing or _troubles(contents):
        raise typer.Exit(1)


def open_source(target: str, *, with_positions: bool = False) -> Contents:
    """Return the description of a replica's snapshot, a file or a checkpoint.

    Args:
        target: A URL or a path.
        with_positions: Whether to include the position of each part of a DCP checkpoint. Positions in safetensors files
            are always included.

    Raises:
        NotFoundError: The file or directory does not exist, or is of an unknown kind.
        UnreadableError: The content of a file contradicts the format.
        ConfigurationError: The URL is malformed, or has an unknown scheme.
        TransportError: The replica is unreachable, or refuses the request.
    """
    if is_url(target):
        return _of_peer(target)
    path = checkpoint_at(Path(target))
    # A checkpoint of this package may have safetensors files too, but only the files of DCP are complete.
    if path.is_dir() and ((path / METADATA_NAME).exists() or any(path.glob(OF_A_RANK))):
        return _of_checkpoint(path, with_positions=with_positions)
    if path.is_dir():
        indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"), key=lambda index: (not index.name.startswith("model."), index))
        return read_files(path, indexes[0] if indexes else None)
    return read_files(path.parent, path) if path.name.endswith(INDEX_SUFFIX) else read_file(path)


def is_url(target: str) -> bool:
    """Return whether the argument of a command is a URL of any scheme, except those of buckets, and not a path."""
    return _URL.match(target) is not None and not is_bucket(target)


def checkpoint_at(path: Path) -> Path:
    """Return the path of the newest complete checkpoint or published version in a directory.

    If ``path`` is a file, or is a checkpoint itself, return ``path``.

    Raises:
        NotFoundError: The directory has no complete checkpoint, or is unreadable.
    """
    try:
        if not path.is_dir() or (path / METADATA_NAME).exists():
            return path
        steps = sorted(
            (int(found[1]), entry)
            for entry in path.iterdir()
            if (found := _NUMBERED.fullmatch(entry.name))
            and ((entry / MANIFEST).exists() or (_is_stored_in(entry) and not any(entry.glob(OF_A_RANK))))
        )
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise NotFoundError(f"expected a checkpoint in {path}: {getattr(error, 'strerror', None) or error}") from error
    if not steps and _is_stored_in(path):
        return path
    if not steps:
        raise NotFoundError(
            f"expected a checkpoint in {path}: it has neither {METADATA_NAME}, nor safetensors files, nor a complete "
            "step-N or version-N directory; name the directory that the trainer saves to, a file or a URL"
        )
    return steps[-1][1]


def _is_stored_in(directory: Path) -> bool:
    patterns = (f"*{SUFFIX}", f"*{INDEX_SUFFIX}")
    return (directory / METADATA_NAME).exists() or any(any(directory.glob(pattern)) for pattern in patterns)


def _of_checkpoint(path: Path, *, with_positions: bool) -> Contents:
    contents = read_dcp(path, with_positions=with_positions)
    found = _STEP_DIRECTORY.fullmatch(path.resolve().name)
    if found is None or not (path / MANIFEST).exists():
        return contents
    return replace(contents, kind=OURS, step=int(found[1]))


def _of_peer(url: str) -> Contents:
    from ft_transport.http.client.peer_status import ask_status, connecting
    from ft_transport.http.peer_address import PeerAddress
    from ft_transport.settings import TransportSettings
    from ft_transport.wire.manifest import SnapshotId
    from ft_transport.wire.routes import FULL_ROUTE, bound_path

    settings, peer = TransportSettings(), PeerAddress.from_url(url)
    connect = connecting(settings.keys(), settings.certificates())
    status = ask_status(peer, connect, within_s=_PEER_WITHIN_S)
    if status.step is None or status.snapshot is None:
        raise UnreadableError(
            f"expected a snapshot at {peer}, got none; the replica takes one when a peer recovers, or for the commands "
            f"ft-transport fetch {url} and ft-transport verify {url}"
        )
    path = bound_path(FULL_ROUTE, status.step, SnapshotId(status.snapshot))
    with connect(peer, _PEER_WITHIN_S) as connection:

        def read(start: int, length: int) -> bytes:
            end = min(start + length, status.snapshot_bytes)
            if end <= start:
                return b""
            response = connection.get(
                path, headers={"Range": f"bytes={start}-{end - 1}"}, expected_status=206, answer_within_s=0.0
            )
            body = bytearray(end - start)
            connection.read_into([memoryview(body)])
            connection.end_response(response)
            return bytes(body)

        contents = read_header(read, kind=f"snapshot of {peer}", name=str(peer))
    return replace(contents, step=status.step)


def _troubles(contents: Contents) -> tuple[str, ...]:
    """Return contradictions between an index and its files: missing files, and files with other tensors."""
    return contents.troubles if contents.form == "files" else ()


def _as_object(contents: Contents) -> dict[str, Any]:
    return {
        "kind": contents.kind,
        "step": contents.step,
        "num_tensors": len(contents.tensors),
        "num_bytes": contents.num_bytes,
        "tensors": [
            {name: getattr(each, name) for name in ("path", "dtype", "shape", "num_bytes", "num_parts")}
            for each in contents.tensors
        ],
        "values": list(contents.values),
        "num_bytes_missing": contents.num_bytes_missing,
        "troubles": _troubles(contents),
    }


def _as_text(contents: Contents, *, with_values: bool) -> str:
    rows = [
        (escape(each.path), escape(each.dtype), _shape(each), f"{each.num_bytes:,}", f"{each.num_parts}")
        for each in contents.tensors
    ]
    rows.insert(0, ("tensor", "dtype", "shape", "bytes", "parts"))
    name, dtype, shape, size = (max(len(row[at]) for row in rows) for at in range(4))
    lines = [f"{row[0]:<{name}}  {row[1]:<{dtype}}  {row[2]:<{shape}}  {row[3]:>{size}}  {row[4]:>5}" for row in rows]
    by_dtype = Counter[str]()
    for each in contents.tensors:
        by_dtype[each.dtype] += each.num_bytes
    shares = ", ".join(f"{escape(name)} {megabytes(num_bytes)}" for name, num_bytes in by_dtype.most_common())
    at = f", step {contents.step}" if contents.step is not None else ""
    lines += ["", f"{contents.kind}{at}: {len(contents.tensors)} tensors, {megabytes(contents.num_bytes)} ({shares})"]
    lines.append(f"{len(contents.values)} other values")
    if contents.num_bytes_missing:
        lines.append(f"✗ the file is truncated: {contents.num_bytes_missing:,} bytes of the tensors are missing")
    lines += [f"✗ {escape(each, 500)}" for each in _troubles(contents)]
    if with_values:
        lines += [f"  {escape(each)}" for each in contents.values]
    return "\n".join(lines)


def _shape(tensor: TensorEntry) -> str:
    # Truncate: one long shape would widen the column for all rows.
    return escape("×".join(map(str, tensor.shape)) or "·")
