"""``ft-transport fetch``: a replica's snapshot as a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from ft_transport.errors import ConfigurationError, escape_peer_text
from ft_transport.telemetry.explain import megabytes

if TYPE_CHECKING:
    from ft_transport.transfer.file_client import FetchedFile

_MAX_NAME: Final = 200


def fetch_command(
    urls: Annotated[
        list[str], typer.Argument(help="URLs of replicas (what their transport tells) that have the same state.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The safetensors file; one that is there is replaced in the end.")
    ] = Path("snapshot.safetensors"),
    step: Annotated[int | None, typer.Option(help="The snapshot of this step; else the newest.", min=0)] = None,
    timeout: Annotated[
        float, typer.Option(help="Give up where nothing comes for so many seconds.", min=0.1, max=1e6)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON, when it is done.")] = False,
) -> None:
    """Receive a replica's snapshot into a safetensors file, from one or several that serve the same.

    Each chunk is compared with its digest before it is written. What has come is kept in FILE.part until all is there:
    called again after an interruption, the command goes on with that, from whichever replica. The job's token and
    certificates are taken from the environment. Exits with 1 if the file is not whole.
    """
    from ft_transport.cli.fetch_display import FetchDisplay
    from ft_transport.cli.snapshot_files import settings_for_files
    from ft_transport.http.peer_address import PeerAddress
    from ft_transport.telemetry.recorder import Recorder
    from ft_transport.transfer.file_client import fetch_to_file

    # The order is that in which they were named, without repetition.
    try:
        sources = list(dict.fromkeys(PeerAddress.from_url(url) for url in urls))
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error
    with FetchDisplay(output) as display:
        try:
            fetched = fetch_to_file(
                sources,
                "latest" if step is None else step,
                output,
                settings=settings_for_files(timeout, display.note),
                recorder=Recorder(),
                on_plan=display.plan,
            )
        except KeyboardInterrupt as interruption:
            display.stop()
            typer.echo(f"interrupted; what has come is in {output}.part: the same command goes on with it", err=True)
            raise typer.Exit(1) from interruption
    typer.echo(msgspec.json.encode(_as_object(output, fetched)) if as_json else _as_text(output, fetched))


def _as_object(path: Path, fetched: FetchedFile) -> dict[str, Any]:
    manifest, record = fetched.manifest, fetched.record
    return {
        "file": str(path),
        "step": manifest.step,
        "snapshot": manifest.snapshot_id,
        "num_bytes": manifest.total_bytes,
        "num_tensors": len(manifest.tensors),
        "num_bytes_fetched": sum(transfer.num_bytes for transfer in record.transfers),
        "num_bytes_kept": fetched.plan.kept_bytes,
        "seconds": record.length_s,
        "sources": [
            {"peer": each.peer, "num_bytes": each.num_bytes, "bytes_per_s": each.bytes_per_s}
            for each in record.transfers
        ],
        "retries": [each.cause for each in record.retries],
    }


def _as_text(path: Path, fetched: FetchedFile) -> str:
    manifest, record, plan = fetched.manifest, fetched.record, fetched.plan
    num_fetched = sum(transfer.num_bytes for transfer in record.transfers)
    rate = num_fetched / record.length_s if record.length_s else 0.0
    lines = [
        f"✓ {path}: step {manifest.step}, {len(manifest.tensors)} tensors, {megabytes(manifest.total_bytes)}, verified",
        f"  {megabytes(num_fetched)} in {record.length_s:.2f} s, {megabytes(rate)}/s"
        + (f"; {megabytes(plan.kept_bytes)} were there already" if plan.kept_bytes else ""),
    ]
    if len(record.transfers) > 1:
        lines += [
            f"  {_shown(each.peer)}: {megabytes(each.num_bytes)}, {megabytes(each.bytes_per_s)}/s"
            for each in record.transfers
        ]
    lines += [f"  tried again: {_shown(each.cause)}" for each in record.retries]
    return "\n".join(lines)


def _shown(text: str) -> str:
    return escape_peer_text(text, max_characters=_MAX_NAME)
