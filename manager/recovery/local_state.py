"""The local state of a replica (``scope="local"``) as a part of its checkpoints and kept snapshots."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from manager.state.registry import StateRegistry

logger = logging.getLogger(__name__)

LOCAL_KEY: Final = "local"
"""The key of a saved state for state that is registered with ``scope="local"``. Each rank saves its own values.

In a quorum, a colon and the name of the replica follow, so that a replica of another name does not load the values.
"""


class LocalState:
    """Saves and loads the local state of one rank, under the name of its replica.

    Args:
        registry: The registered state functions.

    Attributes:
        replica_name: The configured ``replica_id``; an empty str in a quorum if none is configured, ``None`` without a
            quorum. Local state is loaded only if it was saved under the same name, with the same number of ranks.
        rank: The configured rank of this process within the replica; ``None`` for that of ``torch.distributed``.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self.replica_name: str | None = None
        self.rank: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether this replica can find its local state; false in a quorum without ``replica_id``."""
        return self.replica_name != ""

    def part(self) -> dict[str, object]:
        """Return the local state under its key; empty if no state is registered as local."""
        local = self._registry.state_dict("local")
        return {_key(self.replica_name): local} if local else {}

    def saved(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the local state of this replica in a saved state; ``None`` if it contains none."""
        return state.get(_key(self.replica_name)) if self.is_known else None

    def load(self, state: Mapping[str, Any], step: int, source: str, *, only_shared: bool = False) -> None:
        """Load the local state that this replica saved. If it saved none, log that its local state stays unchanged.

        Args:
            state: A saved state.
            step: The committed step of the state.
            source: Where the state was saved, for the log.
            only_shared: See ``StateRegistry.load_state_dict``.

        Raises:
            RegistryError: A load function failed.
        """
        keys = [entry.key for entry in self._registry.entries("local")]
        own = self.saved(state)
        if own is not None:
            self._registry.load_state_dict(own, "local", only_shared=only_shared)
        elif keys:
            saved = [key for key in state if key.partition(":")[0] == LOCAL_KEY]
            reason = (
                f"has local states of {_saver(saved[0])}, and this replica {_owner(self.replica_name)}"
                if saved
                else "has no local states for the number of ranks of this replica"
            )
            logger.warning(
                "step %d from %s: the local states %s are unchanged, because the checkpoint %s",
                step,
                source,
                keys,
                reason,
            )


def _key(replica_name: str | None) -> str:
    return LOCAL_KEY if replica_name is None else f"{LOCAL_KEY}:{replica_name}"


def _saver(local_key: str) -> str:
    _, is_of_quorum, name = local_key.partition(":")
    if not is_of_quorum:
        return "a replica without a quorum, or of an older version"
    return f"replica {name!r}" if name else "a replica without a replica_id"


def _owner(replica_name: str | None) -> str:
    if replica_name is None:
        return "has no quorum"
    return f"is {replica_name!r}" if replica_name else "has no replica_id"
