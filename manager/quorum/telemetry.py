"""Structured log records and profiler spans under torchft's names, for tools made for torchft.

Collectors of torchft's records (``torchft/otel.py``) accept these. Each record has the fields ``job_id`` (from
``JOB_ID``), ``replica_id``, ``rank``, ``quorum_id`` and ``step`` or ``error``. ``torch.profiler.record_function`` costs
microseconds even without a profiler; a span here then costs nothing.
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
        log: One of the three loggers.
        what: The event in words.
        replica_id: See `Manager.replica_id`.
        rank: The rank within the replica.
        quorum_id: The id that process groups receive.
        **fields: torchft's other fields in records of this kind.
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
    """Decorate a function so that each call is a `span`."""

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
    """Return whether a profiler may run; torch's own compiler uses the same check."""
    return profiler._is_profiler_enabled
