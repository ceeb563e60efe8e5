"""Refuses collectives inside state functions.

A state function runs on one rank, when a receiver requests the state of that rank. A collective in it (for a full state
dict, or in an unsharding hook) would wait for the other ranks until the process group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ft_transport.errors import CollectiveRefusedError
from ft_transport.state.placements import dtensor_type

_NAMESPACES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of torch's operators for collectives. Every process group uses them (``torch/distributed``)."""
_WAITS: Final = frozenset({"wait_tensor"})


@contextmanager
def refusing_collectives() -> Iterator[None]:
    """Return a context in which a collective on this thread raises `CollectiveRefusedError`.

    Does nothing if this process is the only rank. Adds a few microseconds to each torch operation in the context.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    mode = _Refusing()  # type: ignore[no-untyped-call]
    try:
        with mode:
            yield
    finally:
        # The mode is still active if a signal handler raised inside torch's ``__enter__`` or ``__exit__``.
        if mode in _get_current_dispatch_mode_stack():
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtensor = dtensor_type()
        if dtensor is not None and any(issubclass(each, dtensor) for each in types):
            return NotImplemented  # DTensor then calls inner operators, which arrive here too (see CommDebugMode).
        if isinstance(func, torch._ops.OpOverload) and func.namespace in _NAMESPACES:
            name = func._schema.name.rpartition("::")[2]
            if name not in _WAITS:
                raise CollectiveRefusedError(
                    f"expected a function that one rank can call alone, but it runs the collective {name!r}, in which "
                    "the other ranks take no part; return local shards in place of a full state dict (FSDP2's own "
                    "state_dict, or get_state_dict without full_state_dict): a receiver gets the parts that it needs "
                    "from all ranks"
                )
        return func(*args, **(kwargs or {}))
