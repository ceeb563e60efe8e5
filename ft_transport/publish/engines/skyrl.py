"""SkyRL's inference server: vLLM with a route that loads an adapter in place.

``POST /skyrl/v1/load_lora_adapter`` (skyrl/backends/skyrl_train/inference_servers/vllm_server_actor.py) replaces what
is loaded under the name; https://github.com/NovaSky-AI/SkyRL. What else the server has is vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_transport.errors import EngineRefusedError
from ft_transport.publish.engines.adapters import deliver_adapter
from ft_transport.publish.engines.engine import Delivery, EngineConnection, checked_url


@dataclass(frozen=True, slots=True)
class SkyRLEngine:
    """An inference server of SkyRL, for adapters.

    Attributes:
        url: Its base URL.
        lora_name: Under which name requests find the adapter.
        headers: Sent with each request.
    """

    url: str
    lora_name: str = "skyrl-lora"
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`."""
        if delivery.kind != "adapter":
            raise EngineRefusedError("expected an adapter: SkyRL's server takes weights by NCCL alone", peer=self.url)

        async def load(name: str, _is_taken: bool) -> None:
            body = {"lora_name": name, "lora_path": str(delivery.directory)}
            answer = await connection.post("/skyrl/v1/load_lora_adapter", body)
            fields = answer.json()
            if not isinstance(fields, dict) or fields.get("status") != "ok":
                raise answer.refusal("expected the status ok")

        return await deliver_adapter(connection, delivery, self.lora_name, load)
