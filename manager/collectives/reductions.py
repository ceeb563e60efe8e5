"""The reductions of one replica in a step: their descriptions, which replicas compare, and their results."""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from manager.errors import UnfinishedReductionError

_HALF_BYTES: Final = 8
_ANNOUNCEMENT: Final = struct.Struct(f"<q?{2 * _HALF_BYTES}s")
_MAX_NAME: Final = (1 << 31) - 1
_NOTHING: Final = "nothing further"
_PART: Final = "in a bucket"
_ADVICE: Final = (
    " before its reduction had ended; allreduce only begins it: call .wait() on what it returns before you clip, "
    "unscale or read gradients, or call manager.average_gradients(model), which waits"
)

_Entry: TypeAlias = "tuple[torch.dtype, torch.Size, str]"
"""The form of a reduction: dtype, shape, operation."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """Describes one reduction, which all replicas must begin alike.

    Attributes:
        name: The parameter whose gradient is reduced, or the content of a bucket; empty for other tensors.
        reduce_op: torch's operation.
        parts: Name and shape of each gradient in a bucket.
    """

    name: str
    reduce_op: Any
    parts: tuple[tuple[str, torch.Size], ...] = ()

    @property
    def is_average(self) -> bool:
        """Whether the sum is divided by the number of participants afterwards; gloo has no average of its own."""
        return _operation(self.reduce_op).is_average

    @property
    def operation(self) -> str:
        """The name of the operation, as messages have it."""
        return _operation(self.reduce_op).name

    @property
    def options(self) -> AllreduceOptions:
        """The options for the process group."""
        return _operation(self.reduce_op).options


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    is_average: bool
    options: AllreduceOptions


def _operation(reduce_op: Any) -> _Operation:
    # An instance of ReduceOp, as torch's functions make it, has no name, and a premultiplied sum a factor.
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
    """Detects a tensor that changes while its reduction runs.

    Args:
        tensor: The tensor; a DTensor itself, because its local part counts no changes.
        local: Its local part.
        parameter: The parameter whose gradient the tensor is; ``None`` for other tensors.
    """

    __slots__ = ("_address", "_local", "_parameter", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, local: torch.Tensor, parameter: torch.Tensor | None) -> None:
        self._tensor = tensor
        self._local = local
        self._parameter = parameter
        self._address = local.data_ptr()
        self._version = _version_of(tensor)

    def check(self) -> None:
        """Make sure that the tensor holds the result of the reduction.

        Raises:
            UnfinishedReductionError: The tensor was changed, freed or replaced.
        """
        if _version_of(self._tensor) != self._version:
            raise UnfinishedReductionError(f"expected {self._name} to stay as it is, and it was changed{_ADVICE}")
        if self._parameter is not None and self._parameter.grad is not self._tensor:
            raise UnfinishedReductionError(f"expected {self._name} to stay in .grad, and it was replaced{_ADVICE}")
        if self._local.data_ptr() != self._address:
            raise UnfinishedReductionError(f"expected {self._name} to stay as it is, and it was freed{_ADVICE}")

    def divide(self, num_participants: int) -> None:
        """Turn the sum into an average."""
        self._local.div_(num_participants)

    @property
    def _name(self) -> str:
        what = "a tensor" if self._parameter is None else "a gradient"
        return f"{what} {list(self._tensor.shape)}"


def _version_of(tensor: torch.Tensor) -> int:
    # Inference tensors count no changes, and views count those of each other.
    return -1 if tensor.is_inference() or tensor._is_view() else tensor._version


class ReductionLog:
    """The reductions of one replica in a step, in order. One thread adds; one thread at a time reads.

    The parts of a bucket have entries of their own before the bucket's, so that a mismatch names the first part that
    differs.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: list[_Entry] = []
        self._names: list[str] = []
        # Made by the first digest: a replica without others never needs them.
        self._hashes: tuple[hashlib.blake2b, hashlib.blake2b] | None = None
        self._num_hashed = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def add(self, reduction: Reduction, tensor: torch.Tensor) -> None:
        """Append a reduction of ``tensor``, the local part of a DTensor."""
        dtype = tensor.dtype
        self._names += [name for name, _ in reduction.parts]
        self._names.append(reduction.name)
        self._entries += [(dtype, shape, _PART) for _, shape in reduction.parts]
        self._entries.append((dtype, tensor.shape, reduction.operation))

    def digest(self, num: int) -> Digest:
        """Return a digest of the first ``num`` entries."""
        if self._hashes is None or num < self._num_hashed:
            self._hashes = hashlib.blake2b(digest_size=_HALF_BYTES), hashlib.blake2b(digest_size=_HALF_BYTES)
            self._num_hashed = 0
        forms, names = self._hashes
        if num > self._num_hashed:
            added = slice(self._num_hashed, num)
            forms.update("".join(map(_form_of, self._entries[added])).encode())
            names.update("".join(f"{name}\n" for name in self._names[added]).encode())
        self._num_hashed = num
        return Digest(forms.digest(), names.digest())

    def summary(self) -> tuple[str, str]:
        """Return the kind of digest, and a digest of all entries. Digests of the same kind are comparable.

        A reduction without a name matches any name: if the log has one, the digest leaves names out.
        """
        digest = self.digest(len(self))
        return ("named", digest.encode().hex()) if all(self._names) else ("forms", digest.forms.hex())

    def names(self, start: int, end: int) -> list[int]:
        """Return hashes of the names of the entries from ``start`` to ``end``: at least 1, or 0 without a name."""
        return [zlib.crc32(name.encode()) & _MAX_NAME | 1 if name else 0 for name in self._names[start:end]]

    def describe(self, index: int) -> str:
        """Return a readable description of an entry."""
        if index >= len(self._entries):
            return _NOTHING
        return f"{self._names[index]} {_form_of(self._entries[index])}".strip()


@functools.lru_cache(maxsize=1 << 16)
def _form_of(entry: _Entry) -> str:
    dtype, shape, operation = entry
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} {operation}\n"


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest of dtypes, shapes and operations, and one of names; 8 bytes each."""

    forms: bytes
    names: bytes

    def encode(self) -> bytes:
        """Encode it."""
        return self.forms + self.names

    @classmethod
    def decode(cls, encoded: bytes) -> Digest:
        """Read what `encode` returned."""
        return cls(encoded[:_HALF_BYTES], encoded[_HALF_BYTES:])


@dataclass(frozen=True, slots=True)
class Announcement:
    """A member's progress in a step.

    Attributes:
        num: Number of entries in its `ReductionLog`.
        is_last: Whether the step has no further reduction.
        digest: Digest of these entries.
    """

    num: int
    is_last: bool
    digest: Digest

    def encode(self) -> bytes:
        """Encode it; all announcements have the same size."""
        return _ANNOUNCEMENT.pack(self.num, self.is_last, self.digest.encode())

    @classmethod
    def decode(cls, encoded: bytes) -> Announcement:
        """Read what `encode` returned."""
        num, is_last, digest = _ANNOUNCEMENT.unpack(encoded)
        return cls(num, is_last, Digest.decode(digest))


def shortest(announced: Sequence[Announcement]) -> int:
    """Return the number of entries that all members have."""
    return min(each.num for each in announced)


def is_cut_short(announced: Sequence[Announcement]) -> bool:
    """Return whether one member has ended its step and another has begun more reductions."""
    num = shortest(announced)
    return any(each.is_last and each.num == num for each in announced) and any(each.num > num for each in announced)
