"""Counts what a process does to its files, and kills it, by SIGKILL, at one of these steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_transport.checkpoint import directory
from ft_transport.coordination.agreement import Agreement

_CALLS = ("mkdir", "rename", "unlink", "rmdir", "fsync", "writev", "link")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Fuse:
    """Steps are counted from `arm` on, in the process that has called it and not in its children.

    `record` is a file that gets the name of the step at which the process was killed: proof that it was.
    """

    def __init__(self, record: Path) -> None:
        self.steps: list[str] = []
        self._record = record
        self._fatal: int | None = None
        self._is_after = False
        self._process: int | None = None
        self._mutex = threading.Lock()

    def install(self, *, is_exchange_there: bool = True) -> None:
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        if is_exchange_there:
            directory._exchange = self._counted("exchange", directory._exchange)
        else:
            directory._exchange = lambda _first, _second: False
        opened, writing = os.open, self._counted("open", os.open)

        def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            return (writing if flags & _WRITES else opened)(path, flags, *args, **kwargs)

        os.open = open_

    def install_phases(self) -> None:
        """A rank that touches no file can be killed between two phases."""
        Agreement.run_on_all_ranks = self._counted("phase", Agreement.run_on_all_ranks)  # type: ignore[method-assign]

    def arm(self, fatal: int | None, *, is_after: bool = False) -> None:
        self.steps.clear()
        self._fatal, self._is_after, self._process = fatal, is_after, os.getpid()

    def disarm(self) -> None:
        self._process = None

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._process:
                return function(*args, **kwargs)
            with self._mutex:
                number = len(self.steps)
                self.steps.append(name)
            if number == self._fatal and not self._is_after:
                self._kill(name)
            try:
                return function(*args, **kwargs)
            finally:
                if number == self._fatal:
                    self._kill(name)

        return run

    def _kill(self, name: str) -> None:
        self._record.write_text(name)
        os.kill(os.getpid(), signal.SIGKILL)
