"""What a snapshot, a file or a checkpoint contains, whichever of them it is."""

from __future__ import annotations

from dataclasses import dataclass

from ft_transport.errors import TransportError


class UnreadableError(TransportError, ValueError):
    """What was named is nothing that can be read here, or not what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor.

    Attributes:
        path: Its name.
        dtype: As torch names it, without ``torch.``.
        shape: Of the whole of it.
        num_bytes: Of the whole of it.
        num_parts: Into how many parts it is stored.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where something is stored: a file beside the metadata (empty: the file itself), where it begins, its length."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All of it.

    Attributes:
        kind: In words.
        tensors: In the order in which they are stored.
        values: Names of what is stored beside them.
        step: The committed step; ``None`` where it is not told.
        parts: Where all of it is stored.
        data_start: Where the data of a single file begins.
    """

    kind: str
    tensors: tuple[TensorEntry, ...]
    values: tuple[str, ...] = ()
    step: int | None = None
    parts: tuple[StoredPart, ...] = ()
    data_start: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)
