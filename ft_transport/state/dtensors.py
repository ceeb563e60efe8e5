"""Tells DTensors from other values without importing ``torch.distributed.tensor``, which takes half a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensor_type() -> type[DTensor] | None:
    """``DTensor``, or ``None`` where nothing has imported it yet: no value of this process is one then."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """The same as ``isinstance(value, DTensor)``."""
    dtensor = dtensor_type()
    return dtensor is not None and isinstance(value, dtensor)
