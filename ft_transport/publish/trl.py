"""TRL: publishes the weights of TRL's asynchronous trainers with a `Publisher`.

``AsyncGRPOTrainer`` and ``AsyncDistillationTrainer`` send weights through an object with the methods of
``WeightTransferProtocol`` (trl/experimental/async_grpo/async_grpo_trainer.py, 1.16.0). The protocol is structural, so
this module does not import TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ft_transport.publish.publisher import Publisher


class PublisherWeightTransfer:
    """Publishes the weights of a TRL trainer; the trainer's argument ``weight_transfer``.

    After each synchronization the inference servers have exactly the trainer's weights: `send_weights` returns when
    the publisher's policy is met, and only then does TRL announce the new version of the model to its rollout worker.
    The trainer calls all methods on its main process, on the training thread.

    Args:
        open_publisher: Returns the publisher. `init_weight_transfer` calls it with the process group to pass to
            `Publisher`: the main process alone, because the other ranks make no calls. The group is ``None`` if
            ``torch.distributed`` is not initialised. `destroy` closes the publisher.

    Attributes:
        publisher: The open publisher, for `Publisher.add_engine` and the like; ``None`` on ranks other than the main
            process, and outside of the training.
    """

    def __init__(self, open_publisher: Callable[[dist.ProcessGroup | None], Publisher]) -> None:
        self._open_publisher = open_publisher
        self.publisher: Publisher | None = None

    def init_weight_transfer(self) -> None:
        """Open the publisher. TRL calls this method when the training begins.

        Raises:
            ConfigurationError: A setting of the publisher is invalid.
            CheckpointInUseError: Another publisher writes to the root.
        """
        if self.publisher is None:
            self.publisher = self._open_publisher(_main_process_alone())

    def pause(self) -> None:
        """Do nothing: the publisher pauses each server itself, and only while the server loads the weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights as the next version, and wait until the publisher's policy is met.

        The number of the version is one more than the newest in the publisher's root, also after a restart of the
        trainer from an earlier checkpoint.

        Args:
            iterator: The names that vLLM knows, and the tensors: parameters of the model, with adapters merged. Of
                sharded parameters, each step gathers one on the device of the trainer.

        Raises:
            PublishError: Too few servers have confirmed the version, or the weights lack names of the previous version.
        """
        self.init_weight_transfer()  # `destroy` closed the publisher if the same trainer has trained before.
        assert self.publisher is not None
        # A gathered parameter must not stay on the device: there is no room for the whole model beside its shards.
        weights = {name: tensor.cpu() for name, tensor in iterator}
        handle = self.publisher.publish((self.publisher.latest() or 0) + 1, weights)
        del weights
        handle.result()

    def resume(self) -> None:
        """Do nothing: the publisher has resumed each server that has complete weights."""

    def destroy(self) -> None:
        """Close the publisher, but not its transport. TRL calls this method when the training ends or fails."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None


def _main_process_alone() -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    # Only the main process makes this call, so no other rank may have to take part in it.
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return group
