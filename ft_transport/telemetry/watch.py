"""What a process tells of itself to who watches it: parts that are asked when somebody looks, and never else.

Nothing is counted twice for it, and a step that nobody watches costs nothing: whoever has something to tell keeps it
anyway, and says here how to ask for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ft_transport.telemetry.last_errors import LastErrors
from ft_transport.telemetry.metrics import Metrics
from ft_transport.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

Part = Callable[[], object]
"""Returns what JSON can hold. Called on any thread; takes no lock for long and waits for nothing."""

_UNTOLD: Final = None


class Watch:
    """The parts that one process tells, by name. Any thread may use it.

    Args:
        recorder: Has the last records.

    Attributes:
        recorder: See the argument.
        metrics: What is counted, the records of the recorder among it.
        errors: The last things that went wrong.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.metrics = Metrics()
        self.metrics.follow(recorder)
        self.errors = LastErrors()
        self._mutex = threading.Lock()
        self._parts: dict[str, Part] = {}

    def tell(self, name: str, part: Part) -> None:
        """Have ``part`` asked for what is told under ``name``; a later one takes its place.

        It is kept for as long as this object: a part of something that may be dropped before holds it weakly.
        """
        with self._mutex:
            self._parts[name] = part

    def state(self) -> dict[str, object]:
        """All that is told now, by name; a part that fails is ``None``, and logged."""
        with self._mutex:
            parts = dict(self._parts)
        return {name: _asked(name, part) for name, part in parts.items()}


def _asked(name: str, part: Part) -> object:
    try:
        return part()
    except Exception:
        logger.exception("what is told of %s could not be found out", name)
        return _UNTOLD
