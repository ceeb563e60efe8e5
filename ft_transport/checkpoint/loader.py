"""The loads of a checkpoint store: choice of the checkpoint, choice of the data to read, and a record of each load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ft_transport.checkpoint.inventory import Inventory, load_newest_good
from ft_transport.checkpoint.load import Destination, LoadedCheckpoint, LoadRequest, load
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.settings import CheckpointSelector, StoreSettings
from ft_transport.coordination.agreement import Agreement
from ft_transport.telemetry.recorder import Recorder, phase


class CheckpointLoader:
    """Loads checkpoints. All ranks make the same calls, on the training thread, while no save runs.

    Args:
        inventory: The existing checkpoints.
        agreement: The group's agreement.
        settings: The store's settings.
        trust: Decides which checkpoints are trusted.
        recorder: Records each load.
    """

    def __init__(
        self,
        inventory: Inventory,
        agreement: Agreement,
        settings: StoreSettings,
        *,
        trust: Trust,
        recorder: Recorder,
    ) -> None:
        self._inventory = inventory
        self._agreement = agreement
        self._settings = settings
        self._trust = trust
        self._recorder = recorder

    def load(self, step: CheckpointSelector, destination: Destination) -> LoadedCheckpoint[Any]:
        """See ``CheckpointStore.load``."""
        with self._recorder.begin("load", phase="find") as recording:
            agreed = self._inventory.agree_on_step(step)
            if agreed == "latest":
                self._inventory.refuse_newer_of_dcp()
            loaded = self._load(agreed, destination)
            # In a load by several ranks, each records the bytes that it has read itself.
            recording.describe(step=loaded.step, num_bytes=loaded.num_bytes_read)
            return loaded

    def load_newest_good(
        self, destination: Destination, list_steps: Callable[[], Sequence[int]]
    ) -> LoadedCheckpoint[Any] | None:
        """Load the newest good checkpoint; see ``CheckpointStore.load_newest_good``.

        Args:
            destination: The destination of the load.
            list_steps: Returns the existing steps, ascending; called before each attempt.
        """
        with self._recorder.begin("load", phase="find") as recording:
            self._inventory.refuse_newer_of_dcp()
            loaded = load_newest_good(list_steps, lambda step: self._load(step, destination))
            if loaded is not None:
                recording.describe(step=loaded.step, num_bytes=loaded.num_bytes_read)
            return loaded

    def _load(self, step: CheckpointSelector, destination: Destination) -> LoadedCheckpoint[Any]:
        phase("find")
        found = self._inventory.find(step)
        request = LoadRequest(
            directory=found.directory,
            step=found.step,
            destination=destination,
            settings=self._settings,
            trust=self._trust,
        )
        phase("read")
        with self._inventory.reading(found):
            return load(request, self._agreement)
