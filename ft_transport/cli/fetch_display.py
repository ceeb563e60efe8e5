"""Shows the progress of a fetch on standard error: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ft_transport.cli.output import escape, megabytes

if TYPE_CHECKING:
    from ft_transport.settings import FetchProgress
    from ft_transport.transfer.file_client import FilePlan

_LINE_EACH_S: Final = 5.0
_MAX_NAMES: Final = 3


class FetchDisplay:
    """Shows one fetch, until it is left as a context manager or stopped. `note` is called by any thread.

    Args:
        path: Where it goes.
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
        self._told_s = time.monotonic()

    def __enter__(self) -> FetchDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Restore the terminal. May be called twice."""
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
        """More has come."""
        with self._lock:
            done_bytes = min(self._total_bytes, self._kept_bytes + progress.done_bytes)
            if self._bar is not None:
                self._bar.update(self._task, completed=done_bytes)
                return
            now_s = time.monotonic()
            if now_s < self._told_s + _LINE_EACH_S:
                return
            rate = progress.done_bytes / max(progress.elapsed_s, 1e-6)
            left_s = (self._total_bytes - done_bytes) / max(rate, 1.0)
            self._say(
                f"{megabytes(done_bytes)} of {megabytes(self._total_bytes)}, {megabytes(rate)}/s, {left_s:.0f} s left"
            )

    def _say(self, text: str) -> None:
        self._told_s = time.monotonic()
        print(text, file=sys.stderr, flush=True)
