"""The format in which engines get a trainer's tensors: names, dtype and size of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ft_transport.checkpoint.plan import MAX_FILE_BYTES
from ft_transport.errors import ConfigurationError
from ft_transport.settings import check_number
from ft_transport.state.casting import CASTABLE
from ft_transport.wire.chunks import digest

Names: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The format in which engines get a trainer's tensors; the same on all ranks.

    Attributes:
        names: Maps the trainer's names, without the wrappers of its modules, to the engines': a function that is called
            with each name, or a table of the names that differ. ``None`` for a name leaves the tensor out, such as a
            value head.
        dtype: Dtype of all floating-point tensors: float64, float32, float16 or bfloat16. Tensors are cast one by one,
            during the copy; integers stay as they are, and weights with float8 tensors are refused, because their
            scales would be cast as well. ``None``: every tensor keeps its own dtype.
        max_shard_bytes: Maximum size of a file of weights; only a single larger tensor exceeds it. An adapter is always
            one file.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    names: Names | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_FILE_BYTES

    def __post_init__(self) -> None:
        names: object = self.names
        if isinstance(names, Mapping):
            for name, new in names.items():
                if not isinstance(name, str) or not (new is None or isinstance(new, str)):
                    raise ConfigurationError(f"expected a table from names to names, or None, got {name!r}: {new!r}")
            # Ranks compare the table only once: a copy cannot change later.
            object.__setattr__(self, "names", dict(names))
        elif names is not None and not callable(names):
            raise ConfigurationError(f"expected a function or a table as names, got {type(names).__name__}")
        if self.dtype is not None and self.dtype not in CASTABLE:
            allowed = ", ".join(str(dtype) for dtype in CASTABLE)
            raise ConfigurationError(f"expected one of {allowed} as dtype, got {self.dtype!r}")
        number = check_number("max_shard_bytes", self.max_shard_bytes, at_least=1)
        object.__setattr__(self, "max_shard_bytes", number)

    def stated(self) -> dict[str, object]:
        """Return the settings that ranks compare, by name; for a function only whether it is set."""
        names: object = self.names
        if isinstance(names, Mapping):
            names = f"a table with the digest {digest(repr(sorted(names.items())).encode()):x}"
        elif names is not None:
            names = "a function"
        return {"names": names, "dtype": self.dtype, "max_shard_bytes": self.max_shard_bytes}
