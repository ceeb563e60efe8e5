"""Names that a profile shows for the parts of a step: those of torchft, so that the two can be compared.

``torch.profiler.record_function`` costs some microseconds with no profiler to tell; here it costs nothing then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")

_PREFIX: Final = "torchft::manager::"
_NOTHING: Final = nullcontext()


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
