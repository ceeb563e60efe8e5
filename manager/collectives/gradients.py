"""Averages all gradients of a model over the replicas in one call.

All replicas must reduce the same tensors, whichever parameters their batches touched. So every trained parameter takes
part, with zeros if a replica has no gradient for it. Flags that are reduced beside the gradients show which parameters
have a gradient on any replica. A parameter without one on every replica keeps ``None``, and its optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from ft_transport.state.dtensors import is_dtensor
from manager.collectives.managed_work import ManagedWork, wait_all
from manager.collectives.reductions import Reduction

_MIN_DIRECT_BYTES: Final = 1 << 20
"""Gradients of this size are reduced in place: a copy into a bucket would cost more than another collective."""
_MAX_BUCKET_BYTES: Final = 32 << 20

NamedParameters: TypeAlias = Sequence[tuple[str, torch.Tensor]]
Allreduce: TypeAlias = Callable[[torch.Tensor, Reduction], ManagedWork]
"""Begins to reduce a tensor in place."""


def named_parameters(trained: nn.Module | Optimizer | Iterable[torch.Tensor]) -> NamedParameters:
    """Return the parameters of a model or an optimizer that get gradients, with names.

    Args:
        trained: A module, an optimizer, or the parameters themselves, in an order that all replicas share.

    Raises:
        TypeError: ``trained`` is none of these.
    """
    if isinstance(trained, nn.Module):
        return [(name, each) for name, each in trained.named_parameters() if each.requires_grad]
    if isinstance(trained, Optimizer):
        trained = [each for group in trained.param_groups for each in group["params"]]
    if isinstance(trained, torch.Tensor) or not isinstance(trained, Iterable):
        raise TypeError(
            f"expected a module, an optimizer or parameters to average the gradients of, got {type(trained).__name__}"
        )
    parameters = list(trained)
    for each in parameters:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"expected parameters to average the gradients of, got {type(each).__name__} among them")
    return [(f"parameter {index}", each) for index, each in enumerate(parameters) if each.requires_grad]


def gradients_of(parameters: Sequence[torch.Tensor]) -> dict[int, tuple[int, torch.Tensor]]:
    """Map the ``id`` of each gradient to its parameter, with its number; valid until a gradient is replaced."""
    return {id(each.grad): (number, each) for number, each in enumerate(parameters) if each.grad is not None}


@dataclass(slots=True)
class _Gradient:
    """One parameter's share of a reduction.

    Attributes:
        name: The parameter's name.
        parameter: The parameter.
        local: The tensor to reduce: dense and contiguous; the local part of a DTensor.
        num_own: Number of dense and of sparse gradients on this replica: (1, 0), (0, 1) or (0, 0).
    """

    name: str
    parameter: torch.Tensor
    local: torch.Tensor
    num_own: tuple[int, int]

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> _Gradient:
        gradient = parameter.grad
        if gradient is None:
            like = parameter.detach()
            local = torch.zeros_like(_local_of(like), memory_format=torch.contiguous_format)
            return cls(name, parameter, local, (0, 0))
        if gradient.layout is not torch.strided:
            return cls(name, parameter, gradient.detach().to_dense(), (0, 1))
        gradient = gradient.detach()
        return cls(name, parameter, _local_of(gradient).contiguous(), (1, 0))

    def settle(self, num_dense: float, num_sparse: float) -> None:
        """Store the average as the parameter's gradient, dense or sparse as it was on the replicas."""
        if num_dense == num_sparse == 0:
            self.parameter.grad = None
        elif num_dense == 0:
            self.parameter.grad = self.local.to_sparse(1)
        elif self.num_own != (1, 0):
            self.parameter.grad = _like(self.parameter, self.local)
        elif self.parameter.grad is not None:
            own = _local_of(self.parameter.grad.detach())
            if own.data_ptr() != self.local.data_ptr():
                # The strides differ. Which gradients share a bucket must not depend on strides.
                own.copy_(self.local)


def average_gradients(parameters: NamedParameters, allreduce: Allreduce) -> bool:
    """Average the gradients over the replicas, and wait for the result.

    Args:
        parameters: The same on all replicas.
        allreduce: Begins a reduction.

    Returns:
        Whether all gradients are averaged. If not, their values are undefined and an error has been reported.
    """
    gradients = [_Gradient.of(name, parameter) for name, parameter in parameters]
    if not gradients:
        return True
    works: list[ManagedWork] = []
    small: dict[tuple[torch.dtype, torch.device], list[_Gradient]] = {}
    for each in gradients:
        if each.local.nbytes >= _MIN_DIRECT_BYTES:
            works.append(allreduce(each.local, Reduction(each.name, ReduceOp.AVG)))
        else:
            small.setdefault((each.local.dtype, each.local.device), []).append(each)
    buckets = [bucket for group in small.values() for bucket in _buckets(group)]
    flat = [torch.cat([each.local.reshape(-1) for each in bucket]) for bucket in buckets]
    for bucket, whole in zip(buckets, flat, strict=True):
        parts = tuple((each.name, each.local.shape) for each in bucket)
        works.append(allreduce(whole, Reduction(f"bucket of {len(bucket)}", ReduceOp.AVG, parts)))
    # Last: if a replica lacks a parameter, the mismatch names that parameter before the number of flags differs.
    flags = torch.tensor([each.num_own for each in gradients], dtype=torch.int32, device=gradients[0].local.device)
    works.append(allreduce(flags, Reduction("which gradients exist", ReduceOp.SUM)))
    if not wait_all(works):
        return False
    # Without ``torch.no_grad``: a signal handler that raises inside it may leave gradients turned off. Nothing here
    # requires them.
    for bucket, whole in zip(buckets, flat, strict=True):
        averaged = torch.split(whole, [each.local.numel() for each in bucket])
        torch._foreach_copy_(
            [each.local for each in bucket],
            [part.view(each.local.shape) for part, each in zip(averaged, bucket, strict=True)],
        )
    for each, (num_dense, num_sparse) in zip(gradients, flags.tolist(), strict=True):
        each.settle(num_dense, num_sparse)
    return True


def _buckets(gradients: Sequence[_Gradient]) -> Iterable[list[_Gradient]]:
    bucket: list[_Gradient] = []
    num_bytes = 0
    for each in gradients:
        if bucket and num_bytes + each.local.nbytes > _MAX_BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(each)
        num_bytes += each.local.nbytes
    yield bucket


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(parameter):
        return local
    whole: Any = parameter
    return type(whole).from_local(  # type: ignore[no-any-return]
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
