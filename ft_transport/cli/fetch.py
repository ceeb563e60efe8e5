"""``ft-transport fetch``: a replica's snapshot as a safetensors file."""

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
"""As shells count: 128 and the number of SIGINT."""
_BESIDE: Final = {
    "manifest": "until a snapshot was there",
    "plan": "to look at what was here",
    "verify": "for late digests",
    "load": "for the disk",
}
"""Phases of a fetch besides its transfer, each as the reason for the time that it takes."""
_LEAST_TOLD_S: Final = 0.05
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
    certificates are taken from the environment. Exits with 1 if the file is not whole, with 130 after Ctrl-C.
    """
    try:
        fetched = _fetch(urls, output, step, timeout)
    except KeyboardInterrupt as interruption:
        part = output.with_name(f"{output.name}.part")
        kept = f"what has come is in {part}: the same command goes on with it" if part.exists() else "nothing had come"
        typer.echo(f"interrupted; {kept}", err=True)
        raise typer.Exit(_INTERRUPTED) from interruption
    typer.echo(msgspec.json.encode(_as_object(output, fetched)) if as_json else _as_text(output, fetched))


def _fetch(urls: list[str], output: Path, step: int | None, timeout_s: float) -> FetchedFile:
    # The order is that in which they were named, without repetition.
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
        "num_bytes_kept": fetched.plan.kept_bytes,
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
    beside = ", ".join(
        f"{lengths[name]:.2f} s {what}" for name, what in _BESIDE.items() if lengths.get(name, 0.0) >= _LEAST_TOLD_S
    )
    rate = num_fetched / transfer_s if transfer_s else 0.0
    lines = [
        f"✓ {path}: step {manifest.step}, {len(manifest.tensors)} tensors, {megabytes(manifest.total_bytes)}, verified",
        f"  {megabytes(num_fetched)} in {transfer_s:.2f} s, {megabytes(rate)}/s"
        + (f"; {megabytes(plan.kept_bytes)} were there already" if plan.kept_bytes else "")
        + f"; {record.length_s:.2f} s in all"
        + (f", {beside}" if beside else ""),
    ]
    if len(record.transfers) > 1:
        lines += [
            f"  {escape(each.peer)}: {megabytes(each.num_bytes)} in {each.length_s:.2f} s, "
            f"{megabytes(each.bytes_per_s)}/s"
            for each in record.transfers
        ]
    lines += [f"  tried again: {escape(each.cause)}" for each in record.retries]
    return "\n".join(lines)


class _Display:
    """Shows the progress of a fetch on standard error: a bar on a terminal, else a line now and then.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                # Names of files and peers are not markup.
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(escape(path.name, 80), total=None)
        self._kept_bytes = self._total_bytes = 0
        self._printed_s = time.monotonic()

    def __enter__(self) -> _Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def plan(self, plan: FilePlan) -> None:
        """Show a new plan of the transfer, from its beginning."""
        names = ", ".join(escape(str(each), 80) for each in plan.sources[:_MAX_NAMES])
        more = f" and {len(plan.sources) - _MAX_NAMES} more" if len(plan.sources) > _MAX_NAMES else ""
        text = f"step {plan.step} from {names}{more}"
        with self._lock:
            self._kept_bytes, self._total_bytes = plan.kept_bytes, plan.data_bytes
            if self._bar is not None:
                self._bar.reset(self._task, description=text, total=float(plan.data_bytes), completed=plan.kept_bytes)
                return
            kept = f", {megabytes(plan.kept_bytes)} are there already" if plan.kept_bytes else ""
            self._say(f"{text}: {megabytes(plan.data_bytes)}{kept}")

    def note(self, progress: FetchProgress) -> None:
        """Show more progress; any thread may call it."""
        with self._lock:
            done_bytes = min(self._total_bytes, self._kept_bytes + progress.done_bytes)
            if self._bar is not None:
                self._bar.update(self._task, completed=done_bytes)
                return
            now_s = time.monotonic()
            if now_s < self._printed_s + _LINE_EACH_S:
                return
            rate = progress.done_bytes / max(progress.elapsed_s, 1e-6)
            left_s = (self._total_bytes - done_bytes) / max(rate, 1.0)
            self._say(
                f"{megabytes(done_bytes)} of {megabytes(self._total_bytes)}, {megabytes(rate)}/s, {left_s:.0f} s left"
            )

    def _say(self, text: str) -> None:
        self._printed_s = time.monotonic()
        print(text, file=sys.stderr, flush=True)
