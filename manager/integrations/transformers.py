"""Adapter for the ``Trainer`` of transformers: it resumes at the next sample, from host memory or from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, __version__
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import TrainOutput, has_length

from ft_transport.errors import ConfigurationError
from manager.integrations.draws import Draws
from manager.state_manager import StateManager

_PROGRESS: Final = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The fields of ``TrainerState`` that change during training and are equal on all ranks."""
_OVERRIDDEN: Final = (
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
    "_load_best_model",
    "_finalize_training",
)
"""Methods of ``Trainer`` that a version without them would not call."""


class FaultTolerantTrainer(Trainer):
    """A ``Trainer`` whose state a manager keeps, saves and resumes; the loop, the data and the callbacks are Trainer's.

    `train` loads the manager's newest kept state or checkpoint, and continues with the next sample: weights and losses
    are those of a run without a failure, bit for bit. For a subclass of ``Trainer`` such as ``SFTTrainer``, derive from
    both: ``class MyTrainer(FaultTolerantTrainer, SFTTrainer)``.

    Args:
        *arguments: Arguments of ``Trainer``.
        manager: A manager without a quorum, created after ``TrainingArguments``, with a ``checkpoint_store``,
            ``keep_every`` or both. `train` registers the model, the optimizer, the scheduler and the progress with it,
            and shuts it down when the training is over. Register further state before you call `train`.
        **keywords: Keywords of ``Trainer``.

    Raises:
        ConfigurationError: The arguments ask for DeepSpeed, FSDP version 1 or ``auto_find_batch_size``, or this version
            of transformers has another ``Trainer``.
    """

    def __init__(self, *arguments: Any, manager: StateManager, **keywords: Any) -> None:
        if missing := [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]:
            raise ConfigurationError(
                f"expected a Trainer with the methods {', '.join(missing)}, got that of transformers {__version__}"
            )
        super().__init__(*arguments, **keywords)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        for is_asked, name in (
            (self.is_deepspeed_enabled, "DeepSpeed"),
            (plugin is not None and plugin.fsdp_version == 1, "FSDP version 1"),
            (self.args.auto_find_batch_size, "auto_find_batch_size"),
            (self.accelerator.use_stateful_dataloader, "use_stateful_dataloader"),
        ):
            if is_asked:
                raise ConfigurationError(f"expected DDP, FSDP version 2 or one device, got a Trainer with {name}")
        self.manager = manager
        self._progress = _Progress(self)
        self._losses = _Losses(self)
        self._draws = Draws()
        self._is_resumed = False
        self._has_begun = False

    def train(self, *arguments: Any, **keywords: Any) -> TrainOutput:
        """Train as ``Trainer.train`` does, from the newest state of the manager on.

        With ``resume_from_checkpoint``, training begins at that checkpoint of ``Trainer`` instead.

        Raises:
            ConfigurationError: The loaded state was trained with other batches.
            PreemptedExit: A preemption was announced (``manager.on_preemption``).
            ManagerError: The manager has a quorum, or has neither a store nor ``keep_every``.
            TransportError: As for ``manager.resume`` and ``manager.start_step``.
        """
        if self._has_begun:
            raise ConfigurationError("expected one call of train for each trainer and manager; create both again")
        self._has_begun = True
        output = super().train(*arguments, **keywords)
        self.manager.shutdown()
        return output

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        manager, accelerator = self.manager, self.accelerator
        # Accelerate's wrapper has no hooks.
        optimizer: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # type: ignore[assignment]
        manager.register("model", accelerator.unwrap_model(self.model))
        manager.register("optimizer", optimizer)
        manager.register("scheduler", self.lr_scheduler)
        if accelerator.scaler is not None:
            manager.register("scaler", accelerator.scaler)
        manager.register("progress", self._progress)
        manager.register("losses", self._losses, scope="local")
        manager.register("draws", self._draws, scope="local")
        manager.attach(optimizer)
        if resume_from_checkpoint is None and manager.resume() is not None:
            self._is_resumed = True
            self._load_callback_state()
        return prepared

    def _run_epoch(self, **keywords: Any) -> None:  # type: ignore[override] # Trainer passes keywords
        """Skip what the loaded state has trained, in the way of ``resume_from_checkpoint``."""
        loader, per_epoch = keywords["train_dataloader"], keywords["num_update_steps_per_epoch"]
        self._progress.begin(per_epoch if has_length(loader) else None)
        self._draws.watch(loader)
        if not self._is_resumed:
            is_first = keywords["epoch"] == keywords["epochs_trained"]  # a checkpoint of Trainer may be from the middle
            num_skipped = keywords["steps_trained_in_current_epoch"] if is_first else 0
            self._progress.position = (keywords["epoch"], num_skipped // self.args.gradient_accumulation_steps)
            self._draws.begin_epoch()
            super()._run_epoch(**keywords)
            return
        self._losses.begin()
        if self._progress.is_stopped or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        first_epoch, num_updates = self._progress.position
        if keywords["epoch"] < first_epoch:
            return
        self._is_resumed = False
        if self.args.ignore_data_skip:
            num_updates = 0
        self._progress.position = (first_epoch, num_updates)
        num_batches = num_updates * self.args.gradient_accumulation_steps
        self._draws.resume_epoch(num_batches)
        keywords["resume_from_checkpoint"] = "the state of the manager"
        keywords["epochs_trained"] = first_epoch
        keywords["steps_trained_in_current_epoch"] = num_batches
        super()._run_epoch(**keywords)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._draws.is_loaded:
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """Begin a step with the manager, and draw the batches of the step as ``Trainer`` does."""
        self.manager.start_step(self.state.global_step)
        epoch, num_updates = self._progress.position
        self._progress.position = (epoch, num_updates + 1)
        samples = super().get_batch_samples(*arguments, **keywords)
        self._draws.end_resume()
        return samples

    def _load_best_model(self) -> None:
        with self.manager.writing("loading the best model"):
            super()._load_best_model()

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> TrainOutput:
        if not self.control.should_training_stop:  # all epochs are over
            self._progress.position = (self._progress.position[0] + 1, 0)
        self.manager.start_step(self.state.global_step)  # a boundary: the last step may have to be kept or saved
        return super()._finalize_training(*arguments, **keywords)


class _Progress:
    """The progress of a trainer, as registered state that is equal on all ranks.

    Attributes:
        position: The epoch, and the number of its optimizer steps that the state contains.
        is_stopped: Whether a callback has ended the loaded run before its last step.
    """

    def __init__(self, trainer: FaultTolerantTrainer) -> None:
        self._trainer = trainer
        self.position = (0, 0)
        self.is_stopped = False
        self._batches: dict[str, int | None] = {}
        self._loaded: Mapping[str, Any] | None = None

    def begin(self, steps_per_epoch: int | None) -> None:
        """Raise if the loaded state counts other batches than this run. ``None``: the data has no length."""
        args = self._trainer.args
        self._batches = {"samples per step": self._trainer.get_total_train_batch_size(args)}
        if steps_per_epoch is not None:
            self._batches["steps per epoch"] = steps_per_epoch
        loaded = json.loads(self._loaded["batches"]) if self._loaded is not None else self._batches
        if loaded != self._batches and not args.ignore_data_skip:
            raise ConfigurationError(
                f"expected the batches of the resumed run, {loaded}, got {self._batches}: samples would be skipped or "
                "repeated; pass ignore_data_skip=True to begin the epoch again"
            )
        self._loaded = None

    def state_dict(self) -> Mapping[str, Any]:
        if self._loaded is not None:
            return self._loaded
        state: Any = self._trainer.state
        control = self._trainer.control
        callbacks: list[Any] = [*self._trainer.callback_handler.callbacks, control]
        # TrainerState puts the states of several callbacks of one class into a list.
        exported: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
        exportable = TrainerState(stateful_callbacks=exported)
        fields = {name: getattr(state, name) for name in _PROGRESS}
        fields["stateful_callbacks"] = exportable.stateful_callbacks
        return {
            "fields": json.dumps(fields, default=_plain),
            "batches": json.dumps(self._batches),
            "position": self.position,
            "is_stopped": bool(control.should_training_stop and state.global_step < state.max_steps),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, value in json.loads(saved["fields"]).items():
            setattr(self._trainer.state, name, value)
        self.position, self.is_stopped = tuple(saved["position"]), saved["is_stopped"]
        self._loaded = saved


def _plain(logged: Any) -> Any:
    """Return a logged tensor or array as numbers for JSON."""
    return logged.tolist()


class _Losses:
    """The losses of a rank since its last log entry. ``Trainer`` resets them between `load_state_dict` and `begin`."""

    def __init__(self, trainer: FaultTolerantTrainer) -> None:
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None

    def begin(self) -> None:
        if self._loaded is not None:
            trainer = self._trainer
            trainer._tr_loss = self._loaded["loss"].to(trainer.args.device)
            trainer._total_loss_scalar = self._loaded["total"]
            trainer._globalstep_last_logged = self._loaded["last_logged"]
            trainer._initial_global_step = 0  # the losses are those of all steps
            trainer.current_flos = self._loaded["flos"]
            self._loaded = None

    def state_dict(self) -> Mapping[str, Any]:
        if self._loaded is not None:
            return self._loaded
        trainer = self._trainer
        return {
            "loss": getattr(trainer, "_tr_loss", torch.tensor(0.0)),
            "total": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "flos": trainer.current_flos,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._loaded = saved
