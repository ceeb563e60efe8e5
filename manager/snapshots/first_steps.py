"""The first step boundaries call the state functions once, outside of the lock, and prefault memory for snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ft_transport import CollectiveRefusedError
from manager.snapshots.run import BOUNDARY_TIMEOUT
from manager.snapshots.sink import SnapshotSink
from manager.state.lock import StateLock

logger = logging.getLogger(__name__)

_PREFAULTED_AT_BOUNDARIES: Final = (2, 4)
"""First and last attempt. One step has been taken by then as a rule, so that the optimizers have made their states."""


class FirstSteps:
    """See the module. Belongs to the training thread.

    Args:
        lock: The lock around the state.
        sink: Makes memory for snapshots ready.
        state: Calls the state functions.
        prefault: Whether that is wanted.
    """

    def __init__(self, lock: StateLock, sink: SnapshotSink, state: Callable[[], object], *, prefault: bool) -> None:
        self._lock = lock
        self._sink = sink
        self._state = state
        self._is_called = False
        self._is_prefaulted = not prefault
        self._num_boundaries = 0

    def call_state(self) -> None:
        """The first call of the state functions, outside of every section.

        DCP's ``get_optimizer_state_dict`` makes the states of an optimizer that has none, by a step of it, which would
        wait inside a read section for that section's own end.

        Raises:
            RegistryError: A state function runs a collective.
        """
        if self._is_called:
            return
        try:
            self._state()
        except Exception as error:
            self._is_called = True
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # On every rank alike, and at the start, when it can be mended.
            logger.debug("the state functions failed at their first call: %s", error)
        # Not where a handler ended the call: the next one would be made inside a section.
        self._is_called = True

    def prefault(self) -> None:
        """Make memory for snapshots of this state ready after the first step; called at each boundary.

        Raises:
            RegistryError: A state function runs a collective.
        """
        self._num_boundaries += 1
        first, last = _PREFAULTED_AT_BOUNDARIES
        if self._is_prefaulted or not first <= self._num_boundaries <= last:
            return
        try:
            with self._lock.read("size of snapshots", BOUNDARY_TIMEOUT):
                self._sink.prefault(self._state())
            self._is_prefaulted = True
        except Exception as error:
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # It comes as late as this where the first call was another.
            # Whoever asks for a snapshot will be told, if it lasts.
            level = logging.DEBUG if self._num_boundaries > first else logging.WARNING
            logger.log(level, "the memory for snapshots could not be prefaulted: %s", error)
