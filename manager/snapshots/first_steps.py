"""The first step boundaries call the state functions once, outside of the lock, and prefault memory for snapshots."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from ft_transport import CollectiveRefusedError
from manager.snapshots.run import BOUNDARY_TIMEOUT
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

logger = logging.getLogger(__name__)

_PREFAULTED_AT_BOUNDARIES: Final = (2, 4)
"""First and last attempt. By then one step has been taken as a rule, so that the optimizers have made their states."""


class FirstSteps:
    """See the module. Owned by the training thread.

    Args:
        state: The state.
        transport: Makes memory for snapshots ready.
        prefault: Whether to prefault memory.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any], *, prefault: bool) -> None:
        self._state = state
        self._transport = transport
        self._is_called = False
        self._is_prefaulted = not prefault
        self._num_boundaries = 0

    def call_state(self) -> None:
        """Call the state functions for the first time, outside of every section.

        DCP's ``get_optimizer_state_dict`` makes the states of an optimizer that has none, by a step of it, which would
        wait inside a read section for that section's own end.

        Raises:
            RegistryError: A state function runs a collective.
        """
        if self._is_called:
            return
        try:
            self._state.content()
        except Exception as error:
            self._is_called = True
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # On every rank alike, and at the start, when the user can fix it.
            logger.debug("the state functions failed at their first call: %s", error)
        # Not if a handler ended the call: the next one would be made inside a section.
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
            with self._state.lock.read("size of snapshots", BOUNDARY_TIMEOUT):
                self._transport.prefault(self._state.content())
            self._is_prefaulted = True
        except Exception as error:
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # It comes this late only if the first call ran otherwise.
            # If the failure lasts, requests for snapshots report it.
            level = logging.DEBUG if self._num_boundaries > first else logging.WARNING
            logger.log(level, "the memory for snapshots could not be prefaulted: %s", error)
