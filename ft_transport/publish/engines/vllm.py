"""vLLM: adapters by ``/v1/load_lora_adapter``, weights by its weight-transfer routes.

Routes: https://docs.vllm.ai/en/latest/features/lora/ (``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``) and
https://docs.vllm.ai/en/latest/training/weight_transfer/ (``VLLM_SERVER_DEV_MODE=1``), as vllm/entrypoints/serve/lora/
api_router.py and vllm/entrypoints/serve/rlhf/api_router.py have them. A successful load answers in plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ft_transport.publish.engines.adapters import deliver_adapter
from ft_transport.publish.engines.engine import Delivery, EngineConnection, checked_url

_ADVICE: Final = (
    "vLLM takes all weights only where it was started with VLLM_SERVER_DEV_MODE=1; publish a LoRA adapter as a "
    "LoRAAdapter"
)


def _update_info(delivery: Delivery) -> Mapping[str, object]:
    return {"path": str(delivery.directory), "version": delivery.version}


@dataclass(frozen=True, slots=True)
class VLLMEngine:
    """A vLLM server.

    Attributes:
        url: Its base URL.
        lora_name: Under which name requests find the adapter. With ``{version}`` in it each version has a name of its
            own, and the one before is unloaded; without, the adapter is replaced in place, between two forward passes,
            by a vLLM that knows ``load_inplace``.
        pause: What happens to requests while weights are replaced (vLLM's ``mode``).
        update_info: Makes what the server's weight-transfer backend expects in ``update_info``. vLLM's own backends
            (NCCL, IPC) carry the bytes themselves; this is for one that reads them from the directory.
        headers: Sent with each request.
    """

    url: str
    lora_name: str = "policy"
    pause: Literal["abort", "wait", "keep"] = "keep"
    update_info: Callable[[Delivery], Mapping[str, object]] = _update_info
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`."""
        if delivery.kind == "weights":
            return await self._update(connection, delivery)
        path = str(delivery.directory)
        return await deliver_adapter(
            connection,
            delivery,
            self.lora_name,
            load=lambda name, is_taken: connection.post(
                "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": is_taken}
            ),
            unload=lambda name: connection.post("/v1/unload_lora_adapter", {"lora_name": name}),
        )

    async def _update(self, connection: EngineConnection, delivery: Delivery) -> int:
        async with connection.resuming(lambda: connection.post("/resume")):
            await connection.pause("/pause", advice=_ADVICE, mode=self.pause, clear_cache="true")
            await connection.post("/start_weight_update", {"is_checkpoint_format": True})
            await connection.post("/update_weights", {"update_info": dict(self.update_info(delivery))})
            await connection.post("/finish_weight_update", {})
        # vLLM has no route that tells a version: each step has answered that it was done.
        return delivery.version
