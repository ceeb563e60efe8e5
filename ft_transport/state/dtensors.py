"""Recognizes DTensors without importing ``torch.distributed.tensor``, which takes half a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensor_type() -> type[DTensor] | None:
    """Return ``DTensor``, or ``None`` if it is not imported; then no value of this process is one."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return ``isinstance(value, DTensor)``."""
    dtensor = dtensor_type()
    return dtensor is not None and isinstance(value, dtensor)
