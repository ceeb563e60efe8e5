"""A weight-transfer backend of a user's for vLLM: it reads the directory that a publisher names.

vLLM loads it in each of its processes, through the entry point that ``vllm_server.plugin`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "directory"


@dataclass
class DirectoryInit(WeightTransferInitInfo):
    """There is nothing to meet."""


@dataclass
class DirectoryUpdate(WeightTransferUpdateInfo):
    """What a publisher's ``update_info`` returns.

    Attributes:
        directory: Of the version.
        num_read: So many tensors can be read, then the disk fails; ``None`` for no failure.
    """

    directory: str
    num_read: int | None = None


class DirectoryEngine(WeightTransferEngine[DirectoryInit, DirectoryUpdate]):
    """As vLLM's own ones, checkpoint names and layer by layer."""

    init_info_cls = DirectoryInit
    update_info_cls = DirectoryUpdate

    def init_transfer_engine(self, init_info: DirectoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        # The base class waits for an accelerator, and there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DirectoryUpdate) -> None:
        self.model.load_weights(_read(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def _read(update: DirectoryUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    num_read = 0
    for file in sorted(Path(update.directory).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if num_read == update.num_read:
                raise OSError(f"the disk failed after {num_read} tensors")
            num_read += 1
            yield name, tensor


def register() -> None:
    """What vLLM calls in each process."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, DirectoryEngine)
