"""SkyRL's inference server: vLLM with a route that loads an adapter in place.

``POST /skyrl/v1/load_lora_adapter`` (skyrl/backends/skyrl_train/inference_servers/vllm_server_actor.py, 0.3.0) replaces
the adapter that is loaded under the name; https://github.com/NovaSky-AI/SkyRL. The server's other routes are vLLM's, so
all weights are delivered as to vLLM. SkyRL itself sends weights by NCCL and CUDA IPC, and since 0.3.0, in no release,
as checkpoint deltas (``/fetch_weights``): dense patches on top of the server's initial model, without an anchor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ft_transport.publish.engines.adapters import adapter_served, deliver_adapter
from ft_transport.publish.engines.engine import Delivery, EngineConnection, checked_url
from ft_transport.publish.engines.vllm import PauseMode, VLLMEngine


@dataclass(frozen=True, slots=True)
class SkyRLEngine:
    """An inference server of SkyRL.

    Attributes:
        url: Base URL of the server.
        lora_name: Name by which requests select the adapter.
        pause: How the server treats requests while weights are replaced (vLLM's ``mode``).
        headers: Sent with each request.
    """

    url: str
    lora_name: str = "skyrl-lora"
    pause: PauseMode = "keep"
    headers: Mapping[str, str] = field(default_factory=dict)
    adapter_features: ClassVar = VLLMEngine.adapter_features

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`."""
        if delivery.kind == "weights":
            return await self._as_vllm().deliver(connection, delivery)

        async def load(name: str, _is_taken: bool) -> None:
            body = {"lora_name": name, "lora_path": str(delivery.directory)}
            answer = await connection.post("/skyrl/v1/load_lora_adapter", body)
            fields = answer.json()
            if not isinstance(fields, dict) or fields.get("status") != "ok":
                raise answer.refusal("expected the status ok")

        return await deliver_adapter(connection, delivery, self.lora_name, load)

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """See `PolledEngine`."""
        if newest.kind == "weights":
            return await self._as_vllm().served_version(connection, newest)
        return await adapter_served(connection, self.lora_name, newest)

    def _as_vllm(self) -> VLLMEngine:
        return VLLMEngine(self.url, pause=self.pause)
