"""Makes steps of an optimizer again, from recorded gradients and hyperparameters.

A newcomer that takes part in the steps of the other replicas has the same averaged gradients as they. It records them,
while it receives the state of the step at which it began. Then it makes the recorded steps, and has the state of the
others without a second transfer. With torch's optimizers the result is equal bit for bit, since a step is a function of
gradients, state and hyperparameters. Callers compare the result nevertheless.

The steps are made by copies of the optimizers, whose parameters are aliases of the replica's own: they share the
memory, but not the gradients, which the training thread uses at the same time.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ft_transport import state_digest
from manager.state.optimizer_guard import has_foreign_hooks
from manager.state.optimizer_states import (
    hyperparameters_of,
    memory_at,
    memory_of_optimizers,
    parameters_of,
    set_hyperparameters,
    tensors_in,
)
from manager.state.registry import StateRegistry
from manager.state.replica_state import ReplicaState

_UNFIT: Final = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""LBFGS computes gradients in its step, and SparseAdam takes sparse gradients, which cannot be recorded."""
_MODULE: Final = "torch.optim"


class ReplayRefusedError(Exception):
    """The steps of a replica cannot be recorded; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One step of one optimizer.

    Attributes:
        number: Number of the optimizer.
        gradients: The gradients, by number of the parameter.
        groups: The parameter groups.
        num_bytes: Size of the gradients.
    """

    number: int
    gradients: Mapping[int, torch.Tensor]
    groups: Sequence[Mapping[str, Any]]
    num_bytes: int


class Replay:
    """Records the steps of a replica's optimizers, and makes them later.

    The training thread calls `record`, `begin` and `finish`; another thread may call `run` at the same time.

    Args:
        optimizers: The optimizers.
        max_bytes: Largest size of the gradients that are recorded at the same time.

    Attributes:
        num_recorded: Number of recorded steps.
        peak_bytes: Largest size of the gradients that were recorded at the same time.
    """

    def __init__(self, optimizers: Sequence[Optimizer], max_bytes: int) -> None:
        self._optimizers = list(optimizers)
        self._max_bytes = max_bytes
        self._copies: list[Optimizer] = []
        self._records: deque[_Record] = deque()
        self._mutex = threading.Lock()
        self._num_bytes = 0
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_recorded = 0
        self.peak_bytes = 0

    @property
    def num_steps_behind(self) -> int:
        """Number of recorded training steps that have not been made, rounded up."""
        return -(-len(self._records) // len(self._optimizers))

    def record(self, optimizer: Optimizer) -> None:
        """Record the step that an optimizer is about to make, and take its gradients away until `give_back`.

        Without gradients, the step changes nothing.

        Raises:
            ReplayRefusedError: The recorded gradients have more than ``max_bytes``.
        """
        parameters = parameters_of([optimizer])
        number = next((at for at, each in enumerate(self._optimizers) if each is optimizer), None)
        if number is None:
            raise ReplayRefusedError(f"{type(optimizer).__name__} was attached after the first step")
        present = {index: each.grad for index, each in enumerate(parameters) if each.grad is not None}
        if any(each.layout is not torch.strided for each in present.values()):
            raise ReplayRefusedError("a gradient is sparse")
        # Copies, because the loop may use the memory again: it may be a part of a bucket.
        gradients = {index: _copied(each) for index, each in present.items()}
        num_bytes = sum(getattr(each, "_local_tensor", each).nbytes for each in gradients.values())
        with self._mutex:
            self._num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)
            if self._num_bytes > self._max_bytes:
                self._records.clear()
                raise ReplayRefusedError(
                    f"the gradients of the recorded steps have {self._num_bytes} bytes, more than replay_bytes "
                    f"({self._max_bytes})"
                )
        self.num_recorded += 1
        groups = hyperparameters_of(optimizer)
        self._records.append(_Record(number=number, gradients=gradients, groups=groups, num_bytes=num_bytes))
        self._taken = [(parameters[index], gradient) for index, gradient in present.items()]
        for parameter, _ in self._taken:
            parameter.grad = None

    def give_back(self) -> None:
        """Give the parameters back the gradients that `record` has taken away."""
        taken, self._taken = self._taken, []
        for parameter, gradient in taken:
            parameter.grad = gradient

    def begin(self) -> None:
        """Copy the optimizers, whose state is that of the step at which recording began."""
        self._copies = [_copy_of(optimizer) for optimizer in self._optimizers]

    def run(self) -> None:
        """Make the recorded steps, and those that are recorded meanwhile."""
        while self._records:
            record = self._records[0]
            stepping = self._copies[record.number]
            set_hyperparameters(stepping, record.groups)
            parameters = parameters_of([stepping])
            for number, gradient in record.gradients.items():
                parameters[number].grad = gradient.to(parameters[number].device)
            type(stepping).step(stepping)
            for number in record.gradients:
                parameters[number].grad = None
            # Only now, since `num_steps_behind` counts the step until it is made.
            self._records.popleft()
            with self._mutex:
                self._num_bytes -= record.num_bytes

    def finish(self) -> None:
        """Give the optimizers the states that their copies have made. More steps may be recorded and made later."""
        for optimizer, made in zip(self._optimizers, self._copies, strict=True):
            for own, alias in zip(parameters_of([optimizer]), parameters_of([made]), strict=True):
                if alias in made.state:
                    optimizer.state[own] = made.state[alias]


def check_replayable(state: ReplicaState, content: Mapping[str, object], named: Sequence[type] = ()) -> None:
    """Make sure that the optimizers' steps explain every change of the tensors that they change.

    Args:
        state: The replica's state.
        content: Its replicated part by key, as its state functions returned it.
        named: Classes of optimizers that the user has named as replayable, beside torch's own.

    Raises:
        ReplayRefusedError: They do not.
    """
    optimizers = state.optimizers()
    if not optimizers:
        raise ReplayRefusedError("no optimizer is attached")
    registered = {id(each) for each in state.registry.holders(Optimizer).values()}
    if not registered <= {id(each) for each in optimizers}:
        raise ReplayRefusedError("an optimizer is registered, but not attached")
    for optimizer in optimizers:
        kind, name = type(optimizer), type(optimizer).__name__
        is_known = kind in named or kind.__module__.startswith(_MODULE)
        if not is_known or isinstance(optimizer, _UNFIT):
            remedy = "" if isinstance(optimizer, _UNFIT) else "; if it does not, name its class in replay_optimizers"
            raise ReplayRefusedError(
                f"{name} may compute more than a function of gradients, state and hyperparameters{remedy}"
            )
        if not state.ledger.steps_with_commits(optimizer):
            raise ReplayRefusedError(f"{name} does not step with each commit")
        if has_foreign_hooks(optimizer):
            raise ReplayRefusedError(f"{name} has step hooks, which may change more than its step")
        if state.scalers.known() and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ReplayRefusedError(f"the gradient scaler passes values to {name} beside its gradients")
        if id(optimizer) not in registered or kind.state_dict is not Optimizer.state_dict:
            raise ReplayRefusedError(f"the state of {name} is not registered as that of the optimizer itself")
    stepped = memory_of_optimizers(optimizers)
    for entry in state.registry.entries("replicated"):
        if isinstance(entry.holder, (nn.Module, Optimizer)):
            continue
        if any(memory_at(tensor) in stepped for tensor in tensors_in(content[entry.key])):
            raise ReplayRefusedError(f"the state function of {entry.key!r} returns tensors of an attached optimizer")


def load_rest(registry: StateRegistry, user: Mapping[str, Any]) -> None:
    """Load what no optimizer computes from the user's part of a state whose other tensors have any values.

    The caller holds the write lock. Modules have received their tensors in place. What this replica has already is not
    loaded, since a load makes data loaders begin another iterator.
    """
    optimizers, modules = registry.holders(Optimizer), registry.holders(nn.Module)
    others = [each for each in registry.entries("replicated") if each.key not in optimizers and each.key not in modules]
    changed = [each.key for each in others if state_digest(registry.call(each)) != state_digest(user[each.key])]
    registry.load_state_dict({key: user[key] for key in changed}, only_shared=True)
    for key, optimizer in optimizers.items():
        set_hyperparameters(optimizer, user[key]["param_groups"])


def load_optimizer_states(registry: StateRegistry, user: Mapping[str, Any]) -> None:
    """Load the optimizers' states, but not their hyperparameters, from the user's part of a received state.

    The caller holds the write lock. Parameters have been received in place.
    """
    optimizers = registry.holders(Optimizer)
    present = {key: hyperparameters_of(optimizer) for key, optimizer in optimizers.items()}
    registry.load_state_dict({key: user[key] for key in optimizers}, only_shared=True)
    for key, optimizer in optimizers.items():
        set_hyperparameters(optimizer, present[key])


def aliased(value: Any) -> Any:
    """Return nested mappings, lists and tuples with an alias of each tensor.

    An alias has the same memory. If another thread changes it, autograd does not notice that, so that a ``backward`` of
    the training thread goes on: its result does not count.
    """
    match value:
        case torch.Tensor():
            return value.data
        case Mapping():
            return {key: aliased(each) for key, each in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(aliased, value))
        case _:
            return value


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory."""
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return gradient.detach().clone() if local.is_cpu else gradient.detach().cpu()


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with aliases of the parameters, with the same states, and without hooks."""
    made = copy.copy(optimizer)
    aliases = {own: own.data for own in parameters_of([optimizer])}
    made.param_groups = [
        {**values, "params": [aliases[own] for own in group["params"]]}
        for group, values in zip(optimizer.param_groups, hyperparameters_of(optimizer), strict=True)
    ]
    made.state = defaultdict(dict, {aliases[own]: each for own, each in optimizer.state.items() if own in aliases})
    return made
