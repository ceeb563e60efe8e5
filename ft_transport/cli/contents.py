"""What a snapshot, a file or a checkpoint contains, whichever of them it is."""

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
"""The bits of an element, of torch's dtypes, and by the names of safetensors of those that torch has not."""
MAX_DIMENSIONS: Final = 64
"""Those of torch's own tensors."""


Form: TypeAlias = Literal["file", "files", "dcp"]
"""One safetensors file, a directory of them, or a directory of DCP's."""


class UnreadableError(TransportError, ValueError):
    """What was named is nothing that can be read here, or not what it says."""


class NothingThereError(UnreadableError):
    """There is nothing of the name, or nothing of a kind that can be looked into."""


class NotComparedError(TransportError):
    """Two things could not be compared; the cause says why."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where something is stored: a file beside the metadata (empty: the file itself), where it begins, its length.

    ``is_raw``: its bytes are the data themselves, and not what ``torch.save`` makes of them. ``is_zstd``: DCP's
    extension has compressed the latter.
    """

    file: str
    start: int
    num_bytes: int
    is_raw: bool = True
    is_zstd: bool = False


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor: where in it that begins, how long its sides are, and where it is stored, if it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredPart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor.

    Attributes:
        path: Its name.
        dtype: As torch names it, without ``torch.``.
        shape: Of the whole of it.
        num_bytes: Of the whole of it.
        num_parts: Into how many parts it is stored.
        pieces: They; none where nobody has asked for them.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_parts: int = 1
    pieces: tuple[TensorPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All of it.

    Attributes:
        kind: In words.
        form: How it is stored.
        tensors: In the order in which they are stored.
        values: What is stored beside them: names, and where it is, for who has asked for that.
        step: The committed step; ``None`` where it is not told.
        data_start: Where the data of a single file begins.
        metadata: What a file says of itself, by name.
        num_bytes_missing: So many bytes its safetensors files are shorter than they should be.
        troubles: What keeps the library from opening its safetensors files, or is at odds with their index.
        notes: What was not looked at.
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
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)
