"""Averages gradients over replicas, and describes reductions so that replicas can compare them.

All replicas must reduce the same tensors, even if their batches used different parameters. So `average_gradients`
reduces a tensor for every trained parameter: zeros, if this replica has no gradient for the parameter. It also reduces
flags, which show whether any replica has a gradient for a parameter. If no replica has one, the gradient stays
``None``, and the optimizer skips the parameter.
"""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed import AllreduceOptions, ReduceOp
from torch.optim import Optimizer

from ft_transport.state.placements import is_dtensor
from manager.collectives.managed_work import ManagedWork, wait_all
from manager.errors import UnfinishedReductionError

HALF_BYTES: Final = 8
"""Size of each of the two digests in a `Digest`."""
_MAX_NAME: Final = (1 << 31) - 1
_NOTHING: Final = "nothing further"
_PART: Final = "in a bucket"
_ADVICE: Final = (
    " before its reduction had ended; allreduce only begins the reduction: call .wait() on the result of allreduce "
    "before you clip, unscale or read gradients, or call manager.average_gradients(model), which waits"
)

_Entry: TypeAlias = "tuple[torch.dtype, torch.Size, str]"
"""The form of a reduction: dtype, shape, operation."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """Describes one reduction. The descriptions of all replicas must be equal.

    Attributes:
        name: Name of the parameter whose gradient is reduced, or a description of a bucket; empty for other tensors.
        reduce_op: torch's operation, such as ``ReduceOp.AVG``.
        parts: Name and shape of each gradient in a bucket; empty if the tensor is no bucket.
        weighting: Description of the microbatches by which all replicas weight the average; empty without weights.
    """

    name: str
    reduce_op: Any
    parts: tuple[tuple[str, torch.Size], ...] = ()
    weighting: str = ""

    @property
    def is_average(self) -> bool:
        """Whether the sum has to be divided by the number of participants afterwards, because gloo cannot average."""
        return _operation(self.reduce_op).is_average

    @property
    def operation(self) -> str:
        """Name of the operation, for messages."""
        name = _operation(self.reduce_op).name
        return f"{name} of {self.weighting}" if self.weighting else name

    def neutral(self, dtype: torch.dtype) -> float | int:
        """Return the value that changes no result: that of a replica that does not contribute."""
        name = _operation(self.reduce_op).name
        if name == "product":
            return 1
        if name not in {"min", "max", "band"}:
            return 0
        if dtype.is_floating_point:
            return math.inf if name == "min" else -math.inf
        if dtype is torch.bool:
            return int(name != "max")
        limits = torch.iinfo(dtype)
        if name == "band":
            return -1 if limits.min < 0 else limits.max
        return limits.max if name == "min" else limits.min

    @property
    def options(self) -> AllreduceOptions:
        """Options for the process group's ``allreduce``."""
        return _operation(self.reduce_op).options


class _Operation(NamedTuple):
    name: str
    is_average: bool
    options: AllreduceOptions


def _operation(reduce_op: Any) -> _Operation:
    # Cached, except for instances of ``ReduceOp``: these may have a factor (premultiplied sum).
    return _named_operation(reduce_op) if type(reduce_op) is ReduceOp.RedOpType else _make_operation(reduce_op)


def _make_operation(reduce_op: Any) -> _Operation:
    is_average = bool(reduce_op == ReduceOp.AVG)
    options = AllreduceOptions()
    chosen: Any = ReduceOp.SUM if is_average else reduce_op
    options.reduceOp = chosen
    named = [name.lower() for name, each in ReduceOp.RedOpType.__members__.items() if reduce_op == each]
    return _Operation(named[0] if named else "another operation", is_average, options)


_named_operation: Final = functools.cache(_make_operation)


class ReducedTensor:
    """Detects that a tensor has changed while it was being reduced.

    Args:
        tensor: The tensor. Pass a DTensor itself, because its local shard's version does not change.
        local: The tensor, or the local shard of a DTensor.
        parameter: The parameter whose gradient ``tensor`` is; ``None`` for other tensors.
    """

    __slots__ = ("_address", "_local", "_parameter", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, local: torch.Tensor, parameter: torch.Tensor | None) -> None:
        self._tensor = tensor
        self._local = local
        self._parameter = parameter
        self._address = local.data_ptr()
        self._version = _version_of(tensor)

    def check(self) -> None:
        """Make sure, after the reduction, that the tensor contains the result.

        Raises:
            UnfinishedReductionError: The tensor was changed, freed or replaced during the reduction.
        """
        if _version_of(self._tensor) != self._version:
            raise UnfinishedReductionError(f"expected {self._name} to stay as it is, but it was changed{_ADVICE}")
        if self._parameter is not None and self._parameter.grad is not self._tensor:
            raise UnfinishedReductionError(f"expected {self._name} to stay in .grad, but it was replaced{_ADVICE}")
        if self._local.data_ptr() != self._address:
            raise UnfinishedReductionError(f"expected {self._name} to stay as it is, but it was freed{_ADVICE}")

    def divide(self, num_participants: int) -> None:
        """Divide the reduced sum by the number of participants, in place."""
        self._local.div_(num_participants)

    @property
    def _name(self) -> str:
        what = "a tensor" if self._parameter is None else "a gradient"
        return f"{what} of shape {list(self._tensor.shape)}"


def _version_of(tensor: torch.Tensor) -> int:
    # Inference tensors have no version, and a view's version also counts changes of other views.
    return -1 if tensor.is_inference() or tensor._is_view() else tensor._version


class ReductionLog:
    """List of the reductions that this replica has begun in a step. One thread may add while another one reads.

    Each gradient in a bucket has its own entry, before the entry of the bucket. So an error can name the first gradient
    that differs.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._names: list[str] = []
        # Made by the first digest, because a replica that trains alone needs none.
        self._hashes: tuple[hashlib.blake2b, hashlib.blake2b] | None = None
        self._num_hashed = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def add(self, reduction: Reduction, tensor: torch.Tensor) -> None:
        """Append a reduction of ``tensor``, which is the local shard if a DTensor is reduced."""
        dtype = tensor.dtype
        self._names += [name for name, _ in reduction.parts]
        self._names.append(reduction.name)
        self._entries += [(dtype, shape, _PART) for _, shape in reduction.parts]
        self._entries.append((dtype, tensor.shape, reduction.operation))

    def digest(self, num: int) -> Digest:
        """Return a digest of the first ``num`` entries."""
        if self._hashes is None or num < self._num_hashed:
            self._hashes = hashlib.blake2b(digest_size=HALF_BYTES), hashlib.blake2b(digest_size=HALF_BYTES)
            self._num_hashed = 0
        forms, names = self._hashes
        if num > self._num_hashed:
            added = slice(self._num_hashed, num)
            forms.update("".join(map(_form_of, self._entries[added])).encode())
            names.update("".join(f"{name}\n" for name in self._names[added]).encode())
        self._num_hashed = num
        return Digest(forms.digest(), names.digest())

    def summary(self) -> tuple[str, str]:
        """Return the kind of digest, and a digest of all entries. Only digests of the same kind can be compared.

        A reduction without a name matches any name. So a log with such a reduction has a digest without names.
        """
        digest = self.digest(len(self))
        return ("named", digest.encode().hex()) if all(self._names) else ("forms", digest.forms.hex())

    def names(self, start: int, end: int) -> list[int]:
        """Return, for each entry from ``start`` to ``end``, a hash of its name (at least 1), or 0 without a name."""
        return [zlib.crc32(name.encode()) & _MAX_NAME | 1 if name else 0 for name in self._names[start:end]]

    def describe(self, index: int) -> str:
        """Return a description of the entry at ``index``, for messages."""
        if index >= len(self._entries):
            return _NOTHING
        return f"{self._names[index]} {_form_of(self._entries[index])}".strip()


@functools.lru_cache(maxsize=1 << 16)
def _form_of(entry: _Entry) -> str:
    dtype, shape, operation = entry
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} {operation}\n"


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of the entries of a `ReductionLog`.

    Attributes:
        forms: Digest of dtypes, shapes and operations, 8 bytes.
        names: Digest of the names, 8 bytes.
    """

    forms: bytes
    names: bytes

    def encode(self) -> bytes:
        """Return both digests as 16 bytes."""
        return self.forms + self.names

    @classmethod
    def decode(cls, encoded: bytes) -> Digest:
        """Decode the result of `encode`."""
        return cls(encoded[:HALF_BYTES], encoded[HALF_BYTES:])


_MIN_DIRECT_BYTES: Final = 1 << 20
"""Size from which gradients are reduced one by one: a copy into a bucket would cost more than another collective."""
_MAX_BUCKET_BYTES: Final = 32 << 20

NamedParameters: TypeAlias = Sequence[tuple[str, torch.Tensor]]
Allreduce: TypeAlias = Callable[[torch.Tensor, Reduction], ManagedWork]
"""Begins to reduce a tensor in place."""


def named_parameters(trained: nn.Module | Optimizer | Iterable[torch.Tensor]) -> NamedParameters:
    """Return the parameters that require gradients, with their names.

    Args:
        trained: A module, an optimizer, or parameters in an order that is the same on all replicas.

    Raises:
        TypeError: ``trained`` is none of these.
    """
    if isinstance(trained, nn.Module):
        return [(name, each) for name, each in trained.named_parameters() if each.requires_grad]
    if isinstance(trained, Optimizer):
        trained = [each for group in trained.param_groups for each in group["params"]]
    if isinstance(trained, torch.Tensor) or not isinstance(trained, Iterable):
        raise TypeError(
            f"expected a module, an optimizer or parameters for average_gradients, got {type(trained).__name__}"
        )
    parameters = list(trained)
    for each in parameters:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"expected parameters for average_gradients, got an object of type {type(each).__name__}")
    return [(f"parameter {index}", each) for index, each in enumerate(parameters) if each.requires_grad]


def gradients_of(parameters: Sequence[torch.Tensor]) -> dict[int, tuple[int, torch.Tensor]]:
    """Map the ``id`` of each gradient to ``(index, parameter)``. The result is valid until a gradient is replaced."""
    return {id(each.grad): (number, each) for number, each in enumerate(parameters) if each.grad is not None}


@dataclass(slots=True)
class _Gradient:
    """The gradient of one parameter, as `average_gradients` reduces it.

    Attributes:
        name: The parameter's name.
        parameter: The parameter.
        local: The dense, contiguous tensor to reduce; for a DTensor, the local shard.
        num_own: Numbers of dense and of sparse gradients on this replica: (1, 0), (0, 1), or (0, 0) without a gradient.
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
        """Store the average as the parameter's gradient.

        It is sparse if the gradients of all replicas were sparse, and ``None`` if no replica had a gradient.
        """
        if num_dense == num_sparse == 0:
            self.parameter.grad = None
        elif num_dense == 0:
            self.parameter.grad = self.local.to_sparse(1)
        elif self.num_own != (1, 0):
            self.parameter.grad = _like(self.parameter, self.local)
        elif self.parameter.grad is not None:
            own = _local_of(self.parameter.grad.detach())
            if own.data_ptr() != self.local.data_ptr():
                # ``local`` is a contiguous copy, because buckets must not depend on the strides of gradients.
                own.copy_(self.local)


def average_gradients(parameters: NamedParameters, allreduce: Allreduce) -> bool:
    """Average the gradients of the same parameters on all replicas, and wait for the result.

    Returns:
        Whether all gradients are averaged. If not, their values are undefined, and ``allreduce`` has reported an error.
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
    # The flags come last: if a replica lacks a parameter, the error then names the parameter, and not the flags.
    flags = torch.tensor([each.num_own for each in gradients], dtype=torch.int32, device=gradients[0].local.device)
    works.append(allreduce(flags, Reduction("which gradients exist", ReduceOp.SUM)))
    if not wait_all(works):
        return False
    # Without ``torch.no_grad``, which would leave gradients off if a signal handler raised. All tensors are detached.
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
