"""The contents of a snapshot, a file or a checkpoint, in one form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ft_transport.errors import TransportError

ITEM_BITS: Final = {
    "bool": 8, "uint8": 8, "int8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex32": 32, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8, "qint8": 8, "quint8": 8, "qint32": 32, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element by dtype: torch's names, and safetensors' names of dtypes that torch lacks."""
MAX_DIMENSIONS: Final = 64
"""The dtypes of torch's own tensors."""


Form: TypeAlias = Literal["file", "files", "dcp"]
"""One safetensors file, a directory of them, or a directory of DCP's."""


class UnreadableError(TransportError, ValueError):
    """The named file is unreadable, or contradicts itself."""


class NotFoundError(UnreadableError):
    """No such file or directory, or one of an unknown kind."""


class NotComparedError(TransportError):
    """Two states could not be compared; the cause has the reason."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored part: a file beside the metadata (empty: the file itself), position, and length.

    ``is_raw`` means that the bytes are the data themselves, not ``torch.save``'s form. ``is_zstd`` means that DCP's
    extension has compressed them.
    """

    file: str
    start: int
    num_bytes: int
    is_raw: bool = True
    is_zstd: bool = False


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor: first index, shape, and its stored part, if any."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredPart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor.

    Attributes:
        path: Its name.
        dtype: torch's name without ``torch.``.
        shape: Shape of the whole tensor.
        num_bytes: Length of the whole tensor.
        num_parts: Number of stored parts.
        pieces: The parts, if requested.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_parts: int = 1
    pieces: tuple[TensorPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All contents.

    Attributes:
        kind: The kind in words.
        form: The storage format.
        tensors: The tensors in storage order.
        values: Names of other stored values, with their parts if requested.
        step: The committed step; ``None`` if unknown.
        data_start: Position of the data in a single file.
        metadata: The file's own metadata by name.
        num_bytes_missing: Number of bytes missing at the ends of its safetensors files.
        troubles: Reasons why the library cannot open its safetensors files, or contradictions with their index.
        notes: Parts that were not examined.
    """

    kind: str
    form: Form = "dcp"
    tensors: tuple[TensorEntry, ...] = ()
    values: dict[str, StoredPart | None] = field(default_factory=dict)
    step: int | None = None
    data_start: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    num_bytes_missing: int = 0
    troubles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Total length of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)
