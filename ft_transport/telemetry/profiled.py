"""Phases of records as spans in a profile of ``torch.profiler``, while a profiler runs.

Nothing is imported for it: a process that profiles has imported torch. Without a profiler a phase costs the check of
one flag, as torch's own spans do.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_MODULE: Final = "torch.autograd.profiler"
_PREFIX: Final = "ft_transport"


class ProfiledPhase:
    """The span of the current phase, while a profiler runs. Used by one thread at a time."""

    def __init__(self) -> None:
        self._span: Any = None

    def begin(self, kind: str, phase: str) -> None:
        """End the previous span, and begin ``ft_transport::<kind>::<phase>``."""
        self.end()
        profiler: Any = sys.modules.get(_MODULE)
        if profiler is not None and profiler._is_profiler_enabled:
            span = profiler.record_function(f"{_PREFIX}::{kind}::{phase}")
            span.__enter__()
            self._span = span

    def end(self) -> None:
        """End the span, if there is one."""
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)
