"""Adapter for torchtitan: a checkpointer that saves behind the training, and resumes at the next sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

from ft_transport import CheckpointStore, HTTPTransport
from ft_transport.errors import ConfigurationError
from manager.errors import RegistryError
from manager.integrations.draws import Generators
from manager.state_manager import StateManager

_DATA: Final = "dataloader"


class FaultTolerantCheckpointer(CheckpointManager):
    """A checkpointer of torchtitan that writes behind the training, and resumes at the next sample.

    A manager keeps, saves and loads the state: weights, optimizers, schedulers, the trainer's counters, and for each
    rank the place in the data and the random generators. Checkpoints of torchtitan in the same folder are loaded too.
    The initial load (``initial_load_path``), the seed checkpoint and the export after the last step
    (``last_save_model_only``) are those of torchtitan. ``async_mode`` has no effect: saves are always asynchronous.

    Attributes:
        manager: The manager. Register further state with it before training.
        place: This rank's place in its data.

    Raises:
        ConfigurationError: The trainer uses pipeline parallelism, excludes other states than the data loader from
            loading, or has replicas and either is not that of ``manager.integrations.torchtitan_replicas`` or sets
            ``enable_first_step_checkpoint``.
        ManagerError: ``handle_preemption`` was set, and this is not the main thread.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of torchtitan's checkpointer, and those of the manager."""

        keep_interval: int = 0
        """Interval, in steps, of states that stay in host memory (``keep_every``). 0: none are kept."""

        handle_preemption: bool = False
        """Whether, after SIGTERM or SIGUSR1, all ranks keep and save the state of the same step, and end."""

    def __init__(self, config: Config, *, ft_manager: Any = None, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._replica = ft_manager if ft_manager is not None and ft_manager.enabled else None
        if self._replica is not None and not isinstance(self._replica.manager, StateManager):
            raise ConfigurationError(
                "expected the FaultTolerantTrainer of manager.integrations.torchtitan_replicas, got torchtitan's"
            )
        if not self.enable and self._replica is None:
            return
        self._trainer: Trainer = parts["states"]["train_state"]
        self.place = DataPlace(parts[_DATA], is_excluded=_DATA in config.exclude_from_loading)
        if self._replica is not None and config.enable_first_step_checkpoint:
            raise ConfigurationError("expected enable_first_step_checkpoint=False with replicas, got True")
        if others := [name for name in config.exclude_from_loading if name != _DATA]:
            raise ConfigurationError(f"expected only {_DATA!r} in exclude_from_loading, got {', '.join(others)}")
        if self._replica is not None:
            self._store, self.manager = self._replica.store, self._replica.manager
        else:
            self._store = store_of(config, parts.get("base_folder", ""))
            self.manager = StateManager(
                checkpoint_transport=HTTPTransport() if config.keep_interval else None,
                checkpoint_store=self._store,
                keep_every=config.keep_interval or None,
            )
        self._register(**parts)
        if config.handle_preemption:
            self.manager.on_preemption()

    def _register(self, *, model_parts: Any, optimizers: Any, lr_schedulers: Any, **_: Any) -> None:
        if len(model_parts) != 1:
            raise ConfigurationError(f"expected one part of the model, got {len(model_parts)}: pipeline parallelism")
        manager, replica = self.manager, self._replica
        manager.register("model", _Model(model_parts[0]), on_training_thread=True)
        each = list(optimizers.optimizers)
        for number, optimizer in enumerate(each):
            manager.register("optimizer" if len(each) == 1 else f"optimizer_{number}", optimizer)
        manager.register("lr_scheduler", lr_schedulers)
        manager.register("train_state", self._trainer if replica is None else replica.progress)
        local = self.place if replica is None else replica.batches.of_place(self.place)
        manager.register(_DATA, local, scope="local", on_training_thread=True)
        manager.attach(*each, every_commit=replica is None or replica.counts_commits)

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise ConfigurationError(
                f"expected load_step=-1, got {step}: move the directories of later steps away to load an earlier one"
            )
        replica = self._replica
        recovery = None
        try:
            recovery = self.manager.resume() if self._store is not None else None
        except RegistryError:
            # torchtitan saves the parameters of fused layers under other names.
            theirs = self._store.newer_of_dcp()
            if theirs is None:
                raise
            if not any(name.startswith("optimizer.") for name in theirs.tensors):
                raise ConfigurationError(
                    f"expected a checkpoint to resume from, got {theirs.path}, the export of a model: the run is over; "
                    "to train on, move the export away, or use it as initial_load_path with another folder"
                ) from None
        is_loaded = True
        if recovery is None:
            if replica is not None:
                self.states["optimizer"].init_cache_state_dict()
            with self.manager.writing("loading a checkpoint of torchtitan"):
                is_loaded = super()._load()
            if replica is None or replica.counts_commits:
                self.manager.load_state_dict({"step": self._trainer.step})
        step = self._trainer.step
        has_place = self.place.is_loaded or (recovery is None and replica is None)
        if step and not has_place and not (replica is not None and replica.knows_place()):
            raise ConfigurationError(
                f"expected the place in the data after step {step}, got a state of other ranks; pass "
                f"exclude_from_loading=[{_DATA!r}] to begin the data again"
            )
        if replica is None:
            self.manager.start_step(step)
        is_over = recovery is not None and step >= self._trainer.config.training.steps
        if is_over and not self.load_only and self._store.latest() != step:
            # The run ended after its last step, and before the export was complete.
            self._end(step, is_exporter=replica is None or replica.replica_id == 0)
        return is_loaded

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        states: dict[str, Any] = super()._states_to_load(model_only)
        if self._replica is not None:
            states.pop(_DATA, None)  # the data of another replica
        return states

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Begin the next step with the manager, and save if it is time. Replicas begin their steps themselves."""
        if self._replica is None:
            self.manager.start_step(curr_step)
        if not self._should_save(curr_step, last_step):
            return False
        if last_step:
            return self._end(
                curr_step, is_exporter=self._replica is None or self._replica.manager.participating_rank() == 0
            )
        if self._replica is None:
            self.manager.save(overwrite=True)
        return self._replica is None

    @torch.no_grad()
    def _end(self, step: int, *, is_exporter: bool) -> bool:
        """Export the model, or save the whole state of the last step."""
        if not is_exporter:
            return False
        if self._replica is None and not self.last_save_model_only and step > 0:
            self.manager.save(wait=True, overwrite=True)
            return True
        if self._replica is not None:
            self.states["optimizer"].init_cache_state_dict()
        self._save_last_step(step)
        return True

    def _close(self) -> None:
        self.manager.shutdown()
        super()._close()

    def __del__(self) -> None:
        """Close nothing: what an exception leaves behind is not over, and a restarted process needs its states."""


class _Model:
    """The parameters and buffers of a model, as they are.

    ``state_dict`` of torchtitan's fused layers splits their parameters, for which all ranks have to gather them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a validation, the last layers are still whole
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if name not in module._non_persistent_buffers_set:
                    tensors[canonical_fqn(f"{prefix}.{name}" if prefix else name)] = tensor.detach()
        return tensors

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])


class DataPlace:
    """The place of a rank in its data, and its random generators.

    Args:
        loader: The data loader of torchtitan.
        is_excluded: Whether to ignore a loaded place, and to begin the data again.

    Attributes:
        is_loaded: Whether a place was loaded, or is to be ignored.
    """

    def __init__(self, loader: Any, *, is_excluded: bool) -> None:
        self._loader = loader
        self.is_excluded = is_excluded
        self.is_loaded = is_excluded
        self.generators = Generators()

    def state_dict(self) -> dict[str, Any]:
        """Return the present place."""
        return {"loader": self._loader.state_dict(), "generators": self.generators.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Move to a place. Call this before you iterate over the loader."""
        if self.is_excluded:
            return
        self._loader.load_state_dict(saved["loader"])
        self.generators.load_state_dict(saved["generators"])
        self.is_loaded = True


def store_of(config: FaultTolerantCheckpointer.Config, base_folder: str, *, read_only: bool = False) -> CheckpointStore:
    """Return the store of the checkpoints that the settings of a checkpointer describe."""
    folder = filesystem.join(base_folder, config.folder)
    return CheckpointStore(folder, keep=config.keep_latest_k or None, read_only=read_only or config.load_only)
