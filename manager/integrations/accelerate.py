"""Adapter for loops with Accelerate: epochs and batches that continue at the next batch after a crash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader

from ft_transport.errors import ConfigurationError
from manager.integrations import manager_of
from manager.integrations.draws import Draws
from manager.state_manager import StateManager

T = TypeVar("T")


class FaultTolerantLoop:
    """The epochs and batches of a training loop with Accelerate, whose state a manager keeps, saves and resumes.

    In a script, after ``accelerator.prepare``::

        loop = FaultTolerantLoop(accelerator, checkpoint_store=CheckpointStore("out/steps", keep=3), save_every=100)
        for epoch in loop.epochs(3):
            for batch in loop.batches(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()

    Creating the loop registers all prepared models, optimizers and schedulers, the gradient scaler and the objects of
    ``register_for_checkpointing``, and resumes the manager's newest state. The results are those of a run without a
    failure, bit for bit. Use it on the training thread.

    Args:
        accelerator: The accelerator, after ``prepare``.
        manager: A manager without a quorum, created after the accelerator, with a ``checkpoint_store``, ``keep_every``
            or both. `epochs` shuts it down when the training is over.
        **settings: Settings of a new `StateManager`, instead of ``manager``.

    Attributes:
        manager: The manager.

    Raises:
        ConfigurationError: Nothing was prepared, the accelerator uses DeepSpeed, Megatron or FSDP version 1, or both a
            manager and settings were given.
        ManagerError: The manager has neither a store nor ``keep_every``.
        TransportError: As for ``manager.resume``.
    """

    def __init__(self, accelerator: Accelerator, manager: StateManager | None = None, **settings: Any) -> None:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        kind = accelerator.distributed_type.value
        if kind in ("DEEPSPEED", "MEGATRON_LM") or (plugin is not None and plugin.fsdp_version == 1):
            raise ConfigurationError(f"expected DDP, FSDP version 2 or one device, got an accelerator with {kind}")
        if not accelerator._models or not accelerator._optimizers:
            raise ConfigurationError(
                f"expected a prepared model and optimizer, got {len(accelerator._models)} models and "
                f"{len(accelerator._optimizers)} optimizers; call accelerator.prepare before"
            )
        self._accelerator = accelerator
        self.manager = manager = manager_of(manager, settings)
        self._draws = Draws()
        self._step, self._epoch, self._batch = 0, 0, 0
        self._batches: dict[str, int] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._has_stepped = False
        self._has_begun = False
        self._num_prepared = self._count_prepared()
        optimizers = [each.optimizer for each in accelerator._optimizers]
        parts: dict[str, list[Any]] = {
            "model": [accelerator.unwrap_model(model) for model in accelerator._models],
            "optimizer": optimizers,
            "scheduler": [each.scheduler for each in accelerator._schedulers],
            "custom": accelerator._custom_objects,
            "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
        }
        for name, objects in parts.items():
            for number, each in enumerate(objects):
                manager.register(f"{name}.{number}", each)
        manager.register("loop", self)
        manager.register("draws", self._draws, scope="local")
        manager.attach(*optimizers)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)
        manager.resume()

    @property
    def step(self) -> int:
        """The number of steps that the state contains: how often optimizers have stepped after a batch."""
        return self._step

    @property
    def batch(self) -> int:
        """The number of the present batch in its epoch, from 0."""
        return self._batch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from 0. Afterwards, shut the manager down.

        Raises:
            TransportError: As for ``manager.start_step``.
            PreemptedExit: A preemption was announced (``manager.on_preemption``).
        """
        while self._epoch < num_epochs:
            yield self._epoch
            self._epoch, self._batch = self._epoch + 1, 0
        self._begin_step()
        self.manager.shutdown()

    def batches(self, loader: DataLoader[T]) -> Iterator[T]:
        """Yield the batches that are left of the present epoch. Call it once in each epoch.

        Args:
            loader: A prepared data loader.

        Raises:
            ConfigurationError: The loaded state was trained with other batches, or the loader cannot be skipped.
            ManagerError: The manager has a quorum.
            TransportError: As for ``manager.start_step``.
            PreemptedExit: A preemption was announced (``manager.on_preemption``).
        """
        self._check_batches(loader)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._epoch)
        self._draws.watch(loader)
        self._draws.resume_epoch(self._batch)
        iterator = iter(skip_first_batches(loader, self._batch) if self._batch else loader)
        while True:
            self._begin_step()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._draws.end_resume()
            yield batch
            self._batch += 1

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position of the loop (for the manager)."""
        if self._loaded is not None:
            return self._loaded
        return {"step": self._step, "epoch": self._epoch, "batch": self._batch, **self._batches}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set the position of the loop (for the manager)."""
        self._step, self._epoch, self._batch = saved["step"], saved["epoch"], saved["batch"]
        self._loaded = saved

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True

    def _begin_step(self) -> None:
        """Begin a step, unless no optimizer has stepped since the last one: gradients are no part of the state."""
        if self._has_stepped or not self._has_begun:
            self._step += self._has_stepped
            self._has_stepped, self._has_begun = False, True
            self.manager.start_step(self._step)

    def _count_prepared(self) -> tuple[int, ...]:
        accelerator = self._accelerator
        return tuple(map(len, (accelerator._models, accelerator._optimizers, accelerator._schedulers)))

    def _check_batches(self, loader: DataLoader[Any]) -> None:
        if self._count_prepared() != self._num_prepared:
            raise ConfigurationError("expected all models and optimizers to be prepared before FaultTolerantLoop")
        if getattr(loader, "use_stateful_dataloader", False):
            raise ConfigurationError("expected a loader without use_stateful_dataloader, which the loop cannot skip")
        samples: int = getattr(loader, "total_batch_size", loader.batch_size)  # type: ignore[assignment]
        self._batches = {"samples": samples, "accumulated": self._accelerator.gradient_accumulation_steps}
        with contextlib.suppress(TypeError):  # a stream has no length
            self._batches["batches"] = len(loader)
        loaded = {name: self._loaded.get(name) for name in self._batches} if self._loaded else self._batches
        if self._batch and loaded != self._batches:
            raise ConfigurationError(
                f"expected the batches of the resumed run, {loaded}, got {self._batches}: samples would be skipped or "
                "repeated"
            )
        self._loaded = None
