"""Adapter for Lightning: ``Trainer.fit`` resumes at the next batch, from host memory or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from ft_transport.errors import ConfigurationError
from manager.integrations import manager_of
from manager.integrations.draws import Generators
from manager.state_manager import StateManager

_CKPT_PATH: Final = "the-state-of-the-manager"
_UNNEEDED: Final = ("hparams_name", "hyper_parameters", "hparams_type", "datamodule_hyper_parameters")
"""Parts of Lightning's checkpoints for the construction of a model. They may contain any objects."""


class FaultTolerance(Callback):
    """Keeps, saves and resumes the state of a ``Trainer`` by a manager; the loop and the data are Lightning's.

    In a script::

        fault_tolerance = FaultTolerance(checkpoint_store=CheckpointStore("out/steps", keep=3), save_every=100)
        trainer = Trainer(callbacks=[fault_tolerance], plugins=[fault_tolerance.checkpoint_io])
        trainer.fit(model, loader, ckpt_path=fault_tolerance.resume())

    The state is what Lightning saves (model, optimizers, schedulers, loops, callbacks), and the random generators. A
    step begins after each step of the optimizer. Use it on the training thread.

    Args:
        manager: A manager without a quorum, with a ``checkpoint_store``, ``keep_every`` or both. It is shut down when
            ``fit`` has ended. For several ranks, create it after ``torch.distributed`` was initialised.
        **settings: Settings of a new `StateManager`, instead of ``manager``.

    Attributes:
        manager: The manager.
        checkpoint_io: A plugin for ``Trainer``. It writes and reads other checkpoints as ``TorchCheckpointIO`` does.

    Raises:
        ConfigurationError: As for `StateManager`, or both a manager and settings were given.
    """

    def __init__(self, manager: StateManager | None = None, **settings: Any) -> None:
        self.manager = manager = manager_of(manager, settings)
        self._trainer: Trainer | None = None
        self._content = _Content(self)
        self._draws = _Draws()
        self._is_resumed = False
        self._begun_epoch: int | None = None
        self.checkpoint_io = _CheckpointIO(self._content)
        manager.register("lightning", self._content)
        manager.register("draws", self._draws, scope="local")

    def resume(self) -> str | None:
        """Load the newest state of the manager. Return the ``ckpt_path`` for ``fit``; ``None`` at the first start.

        Raises:
            ManagerError: The manager has neither a store nor ``keep_every``.
            TransportError: As for ``manager.resume``.
        """
        self._is_resumed = self.manager.resume() is not None
        return _CKPT_PATH if self._is_resumed else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that do not read checkpoints by ``checkpoint_io``, and runs that cannot resume exactly."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if (
            type(strategy) not in (DDPStrategy, SingleDeviceStrategy)
            or strategy.checkpoint_io is not self.checkpoint_io
        ):
            raise ConfigurationError(
                "expected one device or DDP, and the plugin checkpoint_io, got "
                f"{type(strategy).__name__} with {type(strategy.checkpoint_io).__name__}"
            )
        if inexact := _inexact(trainer, pl_module):
            raise ConfigurationError(f"expected a run that resumes exactly, got {', '.join(inexact)}")
        self._trainer = trainer
        others = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined] # Lightning sets it
        # A new list: Lightning calls the hook `setup` for each callback of the old one.
        trainer.callbacks = [*others, self, _EpochEnd(self._begin_step)]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Attach the optimizers. In a resumed run, draw the batches of the epoch that were already trained."""
        if trainer.ckpt_path not in (None, _CKPT_PATH):
            raise ConfigurationError(
                f"expected the ckpt_path of FaultTolerance.resume, got {trainer.ckpt_path}, whose place in the data "
                "is unknown; load its weights into the model instead"
            )
        self.manager.attach(*trainer.optimizers)
        if any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
            raise ConfigurationError("expected no ReduceLROnPlateau: after a restart, Lightning omits one of its steps")
        for loader in getattr(trainer.fit_loop._combined_loader, "flattened", ()):
            batches = getattr(loader, "batch_sampler", None)
            self._draws.generators.include(loader, batches, getattr(batches, "sampler", None))
        if self._is_resumed:
            if self._content.end_load():
                trainer.should_stop = True
            self._skip(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Note the random generators."""
        if trainer.current_epoch != self._begun_epoch:
            self._draws.begin_epoch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step with the manager, if the optimizer has stepped."""
        del pl_module, outputs, batch, batch_idx
        # From a state at this place after the last batch, Lightning 2.6 would skip the next epoch.
        if not trainer.is_last_batch and not _validates(trainer):
            self._begin_step(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Begin the step that follows a batch after which Lightning validates, unless it is the last of its epoch."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and not trainer.is_last_batch:
            self._begin_step(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Shut the manager down: the training is over."""
        self.manager.shutdown()

    def dump(self) -> dict[str, Any]:
        """Return the content of a checkpoint of Lightning, with live tensors."""
        if self._trainer is None:
            return {}
        content = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        content = {name: each for name, each in content.items() if name not in _UNNEEDED}
        return {**content, "should_stop": self._trainer.should_stop}

    def _begin_step(self, trainer: Trainer) -> None:
        if trainer.global_step != self.manager.current_step():
            self.manager.start_step(trainer.global_step)

    def _skip(self, trainer: Trainer) -> None:
        """Set the generators and the data to where the loaded state was taken."""
        loop = trainer.fit_loop
        num_batches, fetcher = loop.epoch_loop.batch_progress.current.ready, loop._data_fetcher
        is_mid_epoch = bool(num_batches) and loop.restarted_mid_epoch
        self._draws.set_generators("epoch_start" if is_mid_epoch else "now")
        self._draws.begin_epoch()
        self._begun_epoch = trainer.current_epoch
        if fetcher is not None and trainer.current_epoch > 0:
            # From the second epoch on, Lightning creates the iterator here, except in a resumed run.
            iter(fetcher)
        if fetcher is not None and is_mid_epoch:
            for _ in range(num_batches):
                next(fetcher)
            fetcher.fetched -= num_batches  # which Lightning adds in a restarted epoch
            self._draws.set_generators("now")
        self._draws.end_load()


class _Content:
    """The content of a checkpoint of Lightning, as registered state."""

    def __init__(self, owner: FaultTolerance) -> None:
        self._owner = owner
        self.loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> Mapping[str, Any]:
        return self.loaded if self.loaded is not None else self._owner.dump()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.loaded = saved

    def end_load(self) -> bool:
        """Forget the loaded state. Return whether a callback, such as ``EarlyStopping``, had ended that run."""
        is_stopped = bool(self.loaded and self.loaded["should_stop"])
        self.loaded = None
        return is_stopped


def _validates(trainer: Trainer) -> bool:
    """Return whether Lightning will validate after the present batch. From a state before, it would not."""
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def _inexact(trainer: Trainer, module: LightningModule) -> list[str]:
    """Return what a run has that changes its state after `FaultTolerance` has begun a step."""
    interval = getattr(trainer, "val_check_interval", None)  # Lightning does not set it if it is a time
    hooks = ["on_train_batch_end", *(["on_validation_end"] if interval != 1.0 else [])]
    found = [f"{type(module).__name__}.{name}" for name in hooks if is_overridden(name, module)]
    return found + (["a val_check_interval in time"] if interval is None else [])


class _EpochEnd(EarlyStopping):
    """Begins the step that follows the last batch of an epoch, and stops nothing.

    At the end of an epoch, Lightning calls the hooks of ``EarlyStopping`` and ``Checkpoint`` after all others. This
    callback is the last one, so the state contains their changes.
    """

    def __init__(self, begin_step: Callable[[Trainer], None]) -> None:
        super().__init__(monitor="")
        self._begin = begin_step

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del pl_module
        self._begin(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


class _Draws:
    """The random generators of a rank now, and at the beginning of the epoch, before its first batch was drawn."""

    def __init__(self) -> None:
        self.generators = Generators()
        self._epoch_start: Mapping[str, Any] = {}
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> Mapping[str, Any]:
        if self._loaded is not None:
            return self._loaded
        return {"now": self.generators.state_dict(), "epoch_start": self._epoch_start}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._loaded = saved

    def begin_epoch(self) -> None:
        self._epoch_start = self.generators.state_dict()

    def set_generators(self, name: str) -> None:
        if self._loaded is not None and self._loaded[name]:
            self.generators.load_state_dict(self._loaded[name])

    def end_load(self) -> None:
        self._loaded = None


class _CheckpointIO(TorchCheckpointIO):
    """Reads the state that the manager has loaded. Other checkpoints are files."""

    def __init__(self, content: _Content) -> None:
        super().__init__()
        self._content = content

    def load_checkpoint(self, path: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the loaded state, or read a file."""
        if path == _CKPT_PATH:
            return dict(self._content.loaded or {})
        return super().load_checkpoint(path, *arguments, **keywords)
