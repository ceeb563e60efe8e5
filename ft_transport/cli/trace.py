"""``ft-transport trace``: records as a trace for Perfetto and chrome://tracing; and the reader of files of records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ft_transport.cli.contents import NotFoundError
from ft_transport.cli.output import escape
from ft_transport.errors import RecordError
from ft_transport.runtime.regular_files import read_regular
from ft_transport.telemetry.record import Record, decode_record
from ft_transport.telemetry.spans import encode_trace


def trace_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files of records (FT_TRANSPORT_RECORDS), of any replicas.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the trace goes; a file that is there is replaced.")
    ] = Path("trace.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Say in JSON what was written.")] = False,
) -> None:
    """Write a trace that https://ui.perfetto.dev opens: a process for each replica, a line for each rank.

    A file that is not there is named, and the others are read. Exits with 1 if there is no record, with 2 if none of
    the files is there, or the trace cannot be written.
    """
    records = read_records(files)
    if not records:
        typer.echo(f"expected a record in {', '.join(map(str, files))}, there is none; nothing was written", err=True)
        raise typer.Exit(1)
    try:
        output.write_bytes(encode_trace(records))
    except OSError as error:
        typer.echo(f"expected to write the trace to {output}: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(msgspec.json.encode({"file": str(output), "num_records": len(records)}))
    else:
        typer.echo(f"{output}: {len(records)} records")


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records of all files, the oldest first. Names files that are unreadable while others are readable.

    Args:
        paths: The files. A replica that never recovered has no file.

    Raises:
        NotFoundError: No file is readable.
        RecordError: A line is not a record. An unfinished last line after others is left out: its process may have been
            killed during the write.
    """
    records, missing = list[Record](), list[str]()
    for path in paths:
        try:
            content = read_regular(path, max_bytes=256 << 20)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            missing.append(f"expected a file of records at {path}: {getattr(error, 'strerror', None) or error}")
        else:
            records += _decode(path, content)
    if len(missing) == len(paths):
        raise NotFoundError(f"{'; '.join(missing)}; they are written where FT_TRANSPORT_RECORDS says")
    for each in missing:
        typer.echo(f"! {escape(each, 600)}", err=True)
    return sorted(records, key=lambda record: record.begun_unix_s)


def _decode(path: Path, content: bytes) -> list[Record]:
    records = list[Record]()
    *lines, unended = content.split(b"\n")
    for number, line in enumerate([*lines, unended] if unended else lines, 1):
        try:
            records.append(decode_record(line))
        except RecordError as error:
            if records and number > len(lines):
                break
            raise RecordError(f"{path}, line {number}: {error}") from error
    return records
