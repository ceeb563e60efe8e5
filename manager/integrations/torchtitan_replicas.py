"""Adapter for torchtitan's trainer of replicas (``torchtitan.experiments.torchft``): it gets this package's manager."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torchft
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.process_group import ManagedProcessGroup
from torchtitan.experiments.torchft.manager import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer as TorchFTTrainer
from torchtitan.trainer import Trainer

from ft_transport.errors import ConfigurationError
from manager.integrations.torchtitan import DataPlace, FaultTolerantCheckpointer, store_of
from manager.local_updates import guard_diloco, guard_local_sgd
from manager.manager import Manager

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, Any], torch.Tensor]


class FaultTolerantTrainer(TorchFTTrainer):
    """torchtitan's trainer of replicas, with this package's ``Manager``.

    Without ``semi_sync_method``, a step that was not committed is repeated with the same batches, and a replica that
    comes back continues with the batch after its last committed step. So no sample is lost or repeated.

    With ``semi_sync_method``, replicas heal from each other. No checkpoint is saved or resumed; only the export after
    the last step is written.

    Raises:
        ConfigurationError: There are replicas, and the checkpointer or the optimizers are not those for replicas.
    """

    step: int
    ntokens_seen: int

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTTrainer.Config):
        """The settings of torchtitan's trainer."""

    def __init__(self, config: Config) -> None:
        self.is_in_step = False
        if config.fault_tolerance.enable:
            if not isinstance(config.checkpoint, FaultTolerantCheckpointer.Config):
                raise ConfigurationError("expected checkpoint=FaultTolerantCheckpointer.Config(...) with replicas")
            if not isinstance(config.optimizer, TorchFTOptimizersContainer.Config):
                raise ConfigurationError("expected optimizer=TorchFTOptimizersContainer.Config(...) with replicas")
        super().__init__(config)

    def init_distributed(self) -> Any:
        """Join the process group of the replica, and the job."""
        parallel_dims = Trainer.init_distributed(self)
        self.ft_manager: _Replica = _Replica(self)
        return parallel_dims

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches; after a step that was not committed, yield its batches again."""
        if self.ft_manager.counts_commits:
            data_iterable = self.ft_manager.batches.drawn(data_iterable, self)
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Train a step. If it is not committed, the next step has the same number, batches and learning rate."""
        replica = self.ft_manager
        if replica.enabled:
            replica.guard(self.optimizers)
        self.is_in_step = True
        try:
            super().train_step(data_iterator)
        finally:
            self.is_in_step = False
        if not replica.counts_commits:
            return
        step = replica.manager.current_step()
        if step == self.step:
            replica.batches.commit(replica.members())
            return
        self.step, self.ntokens_seen = step, replica.batches.num_tokens_before
        replica.batches.repeat()
        self.lr_schedulers.load_state_dict({"last_epoch": self.lr_schedulers.state_dict()["last_epoch"] - 1})
        for scheduler in self.lr_schedulers.schedulers:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def close(self) -> None:
        """Leave the job."""
        super().close()
        if self.ft_manager.enabled:
            self.ft_manager.manager.shutdown()


class _Replica(TorchFTManager):
    """A replica of a job with torchtitan: this package's manager, in the place of torchft's.

    Attributes:
        counts_commits: Whether the replicas form a quorum in every step, so that the trainer's steps are commits.
        store: The store of the checkpoints, of which replica 0 saves all; ``None`` if they are disabled, or with
            ``semi_sync_method``: torchtitan creates its state after it has loaded a checkpoint.
        batches: The batches of this replica.
        progress: The trainer's counters, as registered state.
    """

    manager: Manager

    def __init__(self, trainer: FaultTolerantTrainer) -> None:
        config = trainer.config
        settings, checkpoint = config.fault_tolerance, config.checkpoint
        self._manager, self.counts_commits, self._is_guarded = None, False, False
        if not settings.enable:
            return
        groups = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
        if settings.process_group not in groups:
            raise ConfigurationError(f"expected process_group gloo or nccl, got {settings.process_group}")
        self.group_size, self.replica_id = settings.group_size, settings.replica_id
        self.counts_commits = self.use_async_quorum = settings.semi_sync_method is None
        name = f"torchtitan_ft_{settings.replica_id}"
        self.batches = _Batches(name)
        self.progress = _Progress(trainer, self.batches, counts_commits=self.counts_commits)
        has_states = checkpoint.enable and self.counts_commits
        if checkpoint.enable and not has_states:
            logger.warning(
                "%s: with semi_sync_method=%r no state is saved before the last step; if all replicas die, the job "
                "begins again",
                name,
                settings.semi_sync_method,
            )
        is_saver = has_states and not checkpoint.load_only and settings.replica_id == 0
        self.store = store_of(checkpoint, config.dump_folder, read_only=not is_saver) if has_states else None
        self._manager = Manager(
            pg=groups[settings.process_group](timeout=timedelta(milliseconds=settings.process_group_timeout_ms)),
            min_replica_size=settings.min_replica_size,
            use_async_quorum=self.use_async_quorum,
            replica_id=name,
            checkpoint_store=self.store,
            save_every=checkpoint.interval if is_saver else None,
            keep_every=(checkpoint.keep_interval or None) if has_states else None,
        )
        if self.use_async_quorum:
            self.replicate_pg = ManagedProcessGroup(self._manager)
            self.replicate_pg.register("dp_replicate")

    def knows_place(self) -> bool:
        """Return whether the loaded state says which batches this replica has trained."""
        return bool(self.batches.num_steps)

    def members(self) -> list[str]:
        """Return the names of the replicas that contribute to the present step."""
        decision = self.manager._joined().decision()
        assert decision is not None, "the step has been committed"
        return [member.rsplit(":", 1)[0] for member in decision.group_members]

    def guard(self, optimizers: TorchFTOptimizersContainer) -> None:
        """Guard the DiLoCo or LocalSGD that torchtitan has made; see `guard_diloco`."""
        if self._is_guarded:
            return
        self._is_guarded = True
        for hook in optimizers._optimizer_step_post_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, DiLoCo):
                guard_diloco(self.manager, owner)
            elif isinstance(owner, LocalSGD):
                guard_local_sgd(self.manager, owner)


class _Progress:
    """The trainer's counters, as of the step boundary.

    A quorum in every step forms after the trainer has counted the step, and before it draws the batches.
    """

    def __init__(self, trainer: FaultTolerantTrainer, batches: _Batches, *, counts_commits: bool) -> None:
        self._trainer = trainer
        self._batches = batches
        self._counts_commits = counts_commits

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self._trainer.state_dict())
        if not self._counts_commits:
            return state
        state["step"] -= self._trainer.is_in_step
        return {**state, "num_steps": dict(self._batches.num_steps), "division": self._division()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        division = saved.get("division", self._division())
        if division != self._division() and not self._batches.is_excluded:
            raise ConfigurationError(
                f"expected the division of the data of the loaded state, {division}, got {self._division()}; pass "
                "exclude_from_loading=['dataloader'] to begin the data again"
            )
        self._batches.num_steps = dict(saved.get("num_steps", {}))
        step = saved["step"] + (self._counts_commits and self._trainer.is_in_step)
        self._trainer.load_state_dict({**saved, "step": step})

    def _division(self) -> str:
        trainer = self._trainer
        ranks = getattr(trainer.dataloader, "dp_world_size", trainer.ft_manager.group_size)
        batch = f"{trainer.config.training.local_batch_size} samples"
        return f"{ranks} ranks x {trainer.gradient_accumulation_steps} batches x {batch}"


class _Batches:
    """The batches of a replica whose steps may fail.

    Attributes:
        num_steps: By replica, the number of committed steps to which it has contributed. The numbers are replicated, so
            that a replica that comes back knows its next batch.
        num_tokens_before: The trainer's ``ntokens_seen`` before the present step.
    """

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name
        self.num_steps: dict[str, int] = {}
        self.num_tokens_before = 0
        self._place: DataPlace | None = None
        self._num_drawn = 0
        self._before: dict[str, Any] | None = None
        self._again: deque[Batch] = deque()
        self._drawn: list[Batch] = []

    @property
    def is_excluded(self) -> bool:
        """Return whether this replica begins its data again, whatever place a state has."""
        return self._place is not None and self._place.is_excluded

    def of_place(self, place: DataPlace) -> _Batches:
        """Set the place in the data of which this object is the registered state; return this object."""
        self._place = place
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last committed step, and the number of steps that led there."""
        return self._before if self._before is not None else self._present()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Move to a place. Call this before the first batch is drawn."""
        assert self._place is not None, "registered with its place"
        self._place.load_state_dict(saved)
        self._num_drawn = saved["num_drawn"]

    def drawn(self, loader: Iterable[Batch], trainer: FaultTolerantTrainer) -> Iterator[Batch]:
        """Yield the batches of each step."""
        fresh = iter(loader)
        with suppress(StopIteration):
            while True:
                if not self._drawn:
                    self.num_tokens_before = trainer.ntokens_seen
                    self._skip(fresh, trainer.gradient_accumulation_steps)
                    if not self._again:
                        self._before = self._present()
                inputs, labels = self._next(fresh)
                self._drawn.append((dict(inputs), labels))
                yield inputs, labels

    def commit(self, members: Iterable[str]) -> None:
        """End a step that these replicas have committed."""
        for name in members:
            self.num_steps[name] = self.num_steps.get(name, 0) + 1
        self._num_drawn += 1
        self._before = None
        self._drawn.clear()

    def repeat(self) -> None:
        """End a step that was not committed: its batches come again, with the same random numbers."""
        self._again.extendleft(reversed(self._drawn))
        self._drawn.clear()
        if self._before is not None and self._place is not None:
            self._place.generators.load_state_dict(self._before["generators"])

    def _present(self) -> dict[str, Any]:
        assert self._place is not None, "registered with its place"
        return {**self._place.state_dict(), "num_drawn": self._num_drawn}

    def _skip(self, fresh: Iterator[Batch], num_per_step: int) -> None:
        """Skip the batches that this replica has trained, according to the replicated state."""
        missing = self.num_steps.get(self._own_name, 0) - self._num_drawn
        if missing < 0:
            raise ConfigurationError(
                f"expected a place in the data of at most step {self._num_drawn + missing} of this replica, got "
                f"{self._num_drawn}: its kept state is newer than that of the other replicas; drop it, with "
                "`ft-transport keepers --end` on this host, and start again"
            )
        self._num_drawn += missing
        if self._place is not None and self._place.is_excluded:
            self._place.is_excluded = False  # the next heal of this process counts
        elif missing:
            logger.info("%s: skips the batches of %d steps that it has trained", self._own_name, missing)
            for _ in range(missing * num_per_step):
                self._next(fresh)

    def _next(self, fresh: Iterator[Batch]) -> Batch:
        return self._again.popleft() if self._again else next(fresh)
