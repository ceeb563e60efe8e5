"""``ft-transport trace``: records as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_transport.cli.records_files import read_records
from ft_transport.telemetry.chrome_trace import encode_trace


def trace_command(
    files: Annotated[list[Path], typer.Argument(help="Files of records (FT_TRANSPORT_RECORDS), of any replicas.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the trace goes.")] = Path("trace.json"),
) -> None:
    """Write a trace that https://ui.perfetto.dev opens: a process for each replica, a line for each rank."""
    records = read_records(files)
    try:
        output.write_bytes(encode_trace(records))
    except OSError as error:
        typer.echo(f"expected to write the trace to {output}: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{output}: {len(records)} records")
