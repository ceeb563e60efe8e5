from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from benchmarks import processes


@pytest.fixture
def fork_server() -> Iterator[None]:
    """Ends the server that the test's processes come from, which would else serve until this process ends."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def bare_fork_server(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without torch, for processes that do without it."""
    monkeypatch.setattr(processes, "_PRELOADED", ())
