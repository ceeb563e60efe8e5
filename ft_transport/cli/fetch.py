"""``ft-transport fetch``: receives a replica's snapshot into a safetensors file."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ft_transport.cli.output import escape, megabytes
from ft_transport.cli.snapshot_files import settings_for_files
from ft_transport.errors import ConfigurationError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.settings import FetchProgress
from ft_transport.telemetry.recorder import Recorder
from ft_transport.transfer.files import FetchedFile, FilePlan, fetch_to_file

_INTERRUPTED: Final = 130
"""The exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""
_OTHER_PHASES: Final = {
    "manifest": "until a snapshot was there",
    "plan": "to check the data in the .part file",
    "verify": "to verify late digests",
    "load": "to write to the disk",
}
"""Phases of a fetch other than the transfer, with words that follow the seconds of the phase."""
_LEAST_SHOWN_S: Final = 0.05
_LINE_EACH_S: Final = 5.0
_MAX_NAMES: Final = 3


def fetch_command(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL",
            help="URLs of replicas (as `metadata()` of their transport returns them) that have the same state.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The safetensors file; an existing file is replaced at the end.")
    ] = Path("snapshot.safetensors"),
    step: Annotated[int | None, typer.Option(help="Step of the snapshot; by default the newest.", min=0)] = None,
    timeout: Annotated[
        float, typer.Option(help="Fail if no data arrives for this number of seconds.", min=0.1, max=1e6)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Receive a snapshot into a safetensors file, from one or several replicas that serve the same state.

    Each chunk is compared with its digest before it is written. Received data stays in FILE.part until the file is
    complete. After an interruption, call the command again: it requests only the missing chunks, from any replica. The
    job token and certificates come from the environment. Exits with 1 if the file is incomplete, with 130 after Ctrl-C.
    """
    try:
        fetched = _fetch(urls, output, step, timeout)
    except KeyboardInterrupt as interruption:
        part = output.with_name(f"{output.name}.part")
        kept = f"the received data is in {part}; call the same command again to fetch the rest"
        typer.echo(f"interrupted; {kept if part.exists() else 'no data was received'}", err=True)
        raise typer.Exit(_INTERRUPTED) from interruption
    typer.echo(msgspec.json.encode(_as_object(output, fetched)) if as_json else _as_text(output, fetched))


def _fetch(urls: list[str], output: Path, step: int | None, timeout_s: float) -> FetchedFile:
    # Keep the order of the arguments, without duplicates.
    try:
        sources = list(dict.fromkeys(PeerAddress.from_url(url) for url in urls))
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error
    with _Display(output) as display:
        return fetch_to_file(
            sources,
            "latest" if step is None else step,
            output,
            settings=settings_for_files(timeout_s, display.note),
            recorder=Recorder(),
            on_plan=display.plan,
        )


def _as_object(path: Path, fetched: FetchedFile) -> dict[str, Any]:
    manifest, record = fetched.manifest, fetched.record
    return {
        "file": str(path),
        "step": manifest.step,
        "snapshot": manifest.snapshot_id,
        "num_bytes": manifest.total_bytes,
        "num_tensors": len(manifest.tensors),
        "num_bytes_fetched": sum(transfer.num_bytes for transfer in record.transfers),
        "num_bytes_kept": fetched.plan.stored_bytes,
        "seconds": record.length_s,
        "seconds_by_phase": record.phase_lengths(),
        "sources": [
            {"peer": each.peer, "num_bytes": each.num_bytes, "seconds": each.length_s, "bytes_per_s": each.bytes_per_s}
            for each in record.transfers
        ],
        "retries": [each.cause for each in record.retries],
    }


def _as_text(path: Path, fetched: FetchedFile) -> str:
    manifest, record, plan = fetched.manifest, fetched.record, fetched.plan
    num_fetched = sum(transfer.num_bytes for transfer in record.transfers)
    lengths = record.phase_lengths()
    transfer_s = lengths.get("transfer", 0.0)
    others = ", ".join(
        f"{lengths[name]:.2f} s {purpose}"
        for name, purpose in _OTHER_PHASES.items()
        if lengths.get(name, 0.0) >= _LEAST_SHOWN_S
    )
    rate = num_fetched / transfer_s if transfer_s else 0.0
    lines = [
        f"✓ {path}: step {manifest.step}, {len(manifest.tensors)} tensors, {megabytes(manifest.total_bytes)}, verified",
        f"  {megabytes(num_fetched)} in {transfer_s:.2f} s, {megabytes(rate)}/s"
        + (f"; {megabytes(plan.stored_bytes)} were there already" if plan.stored_bytes else "")
        + f"; {record.length_s:.2f} s in total"
        + (f", {others}" if others else ""),
    ]
    if len(record.transfers) > 1:
        lines += [
            f"  {escape(each.peer)}: {megabytes(each.num_bytes)} in {each.length_s:.2f} s, "
            f"{megabytes(each.bytes_per_s)}/s"
            for each in record.transfers
        ]
    lines += [f"  retried after: {escape(each.cause)}" for each in record.retries]
    return "\n".join(lines)


class _Display:
    """Shows the progress of a fetch on standard error: a bar on a terminal, otherwise a line every five seconds.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                # Do not interpret brackets in names of files and peers as markup.
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(escape(path.name, 80), total=None)
        self._stored_bytes = self._total_bytes = 0
        self._printed_s = time.monotonic()

    def __enter__(self) -> _Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def plan(self, plan: FilePlan) -> None:
        """Show the sources and size of a transfer that begins, and reset the progress."""
        names = ", ".join(escape(str(each), 80) for each in plan.sources[:_MAX_NAMES])
        more = f" and {len(plan.sources) - _MAX_NAMES} more" if len(plan.sources) > _MAX_NAMES else ""
        text = f"step {plan.step} from {names}{more}"
        with self._lock:
            self._stored_bytes, self._total_bytes = plan.stored_bytes, plan.data_bytes
            if self._bar is not None:
                self._bar.reset(self._task, description=text, total=float(plan.data_bytes), completed=plan.stored_bytes)
                return
            kept = f", {megabytes(plan.stored_bytes)} are there already" if plan.stored_bytes else ""
            self._print(f"{text}: {megabytes(plan.data_bytes)}{kept}")

    def note(self, progress: FetchProgress) -> None:
        """Show how much has been received. Any thread may call this."""
        with self._lock:
            done_bytes = min(self._total_bytes, self._stored_bytes + progress.done_bytes)
            if self._bar is not None:
                self._bar.update(self._task, completed=done_bytes)
                return
            now_s = time.monotonic()
            if now_s < self._printed_s + _LINE_EACH_S:
                return
            rate = progress.done_bytes / max(progress.elapsed_s, 1e-6)
            left_s = (self._total_bytes - done_bytes) / max(rate, 1.0)
            self._print(
                f"{megabytes(done_bytes)} of {megabytes(self._total_bytes)}, {megabytes(rate)}/s, {left_s:.0f} s left"
            )

    def _print(self, text: str) -> None:
        self._printed_s = time.monotonic()
        print(text, file=sys.stderr, flush=True)
