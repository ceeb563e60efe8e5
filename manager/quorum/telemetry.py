"""What tools for torchft see: structured log records and profiler spans, under torchft's names.

What collects torchft's records (``torchft/otel.py``) collects these. Each has the fields ``job_id`` (from ``JOB_ID``),
``replica_id``, ``rank``, ``quorum_id`` and ``step`` or ``error``. ``torch.profiler.record_function`` costs some
microseconds with no profiler to tell; a span costs nothing then.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")

QUORUMS: Final = logging.getLogger("torchft_quorums")
COMMITS: Final = logging.getLogger("torchft_commits")
ERRORS: Final = logging.getLogger("torchft_errors")
_PREFIX: Final = "torchft::manager::"
_NOTHING: Final = nullcontext()


def record(
    log: logging.Logger, what: str, *, replica_id: str, rank: int, quorum_id: int, **fields: int | bool | str
) -> None:
    """Log one event.

    Args:
        log: One of the three.
        what: The event in words.
        replica_id: As in `Manager.replica_id`.
        rank: Within the replica.
        quorum_id: What process groups are told as theirs.
        **fields: What else torchft says in records of this kind.
    """
    if log.isEnabledFor(logging.INFO):
        common = {
            "job_id": os.environ.get("JOB_ID", "unknown"),
            "replica_id": replica_id,
            "rank": rank,
            "quorum_id": quorum_id,
        }
        log.info("%s", what, extra={**common, **fields})


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows up as ``torchft::manager::<name>`` in a profile."""
    return torch.profiler.record_function(_PREFIX + name) if _is_profiled() else _NOTHING


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that its calls show up as `span` says."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _is_profiled():
                return function(*args, **kwargs)
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


def _is_profiled() -> bool:
    """Whether there may be a profiler; torch's own compiler asks for it in the same way."""
    return profiler._is_profiler_enabled
