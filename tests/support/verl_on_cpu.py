"""Lets verl's own FSDP engine run on the CPU, through verl's registries of platforms and engines.

verl 0.9.1 has platforms for accelerators only. With ``VERL_USE_EXTERNAL_MODULES=verl_on_cpu``, verl loads this module
in each of its processes, and with ``VERL_PLATFORM=cpu`` it uses the platform.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

# verl would add the backend of the platform to that of the CPU, which torch refuses for the CPU itself.
verl.utils.distributed.initialize_global_process_group_ray = partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)


class _Device(ModuleType):
    """The functions of a ``torch.<device>`` module that verl calls."""

    is_available = staticmethod(lambda: False)
    empty_cache = ipc_collect = synchronize = staticmethod(lambda *_: None)
    memory_allocated = memory_reserved = staticmethod(lambda *_: 0)
    mem_get_info = staticmethod(lambda *_: (0, 0))


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """The CPU. It counts as one of Ray's GPUs, of which verl's resource pools take one for each worker."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    is_platform_available = is_available

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = set_device

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()


from verl.workers.engine import EngineRegistry  # noqa: E402 - reads the platform
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
