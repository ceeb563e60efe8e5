"""``ft-transport trace``: records as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from ft_transport.cli.records_files import read_records
from ft_transport.errors import escape_peer_text
from ft_transport.telemetry.chrome_trace import encode_trace

_MAX_CHARACTERS: Final = 600


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
    records = read_records(files, on_missing=lambda said: typer.echo(f"! {_shown(said)}", err=True))
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


def _shown(text: str) -> str:
    return escape_peer_text(text, max_characters=_MAX_CHARACTERS)
