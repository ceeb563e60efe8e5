"""vLLM: adapters by ``/v1/load_lora_adapter``, weights by its weight-transfer routes.

Routes: https://docs.vllm.ai/en/latest/features/lora/ (``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``) and
https://docs.vllm.ai/en/latest/training/weight_transfer/ (``VLLM_SERVER_DEV_MODE=1``), as vllm/entrypoints/serve/lora/
api_router.py and vllm/entrypoints/rl/online/api_router.py (0.32) have them. A successful load answers in plain text.
``finish_weight_update`` sets ``weight_version`` when the workers are done (``AsyncLLM.finish_weight_update``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeAlias

from ft_transport.errors import EngineRefusedError
from ft_transport.publish.engines.adapters import adapter_served, deliver_adapter
from ft_transport.publish.engines.engine import NO_ROUTE, Delivery, EngineConnection, checked_url
from ft_transport.publish.engines.weight_version import confirmed_weight_version, weight_version

_ADVICE: Final = (
    "vLLM takes all weights only where it was started with VLLM_SERVER_DEV_MODE=1; publish a LoRA adapter as a "
    "LoRAAdapter"
)

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]

_RESTART: Final = (
    "vLLM keeps of a refused update what it has read, and has refused the one after it as well: restart this engine"
)
_IS_OPEN: Final = "already active"
"""What vLLM answers where a weight update was begun and not finished (``start_weight_update`` in gpu_worker.py)."""


@dataclass(frozen=True, slots=True)
class VLLMEngine:
    """A vLLM server.

    Attributes:
        url: Its base URL.
        lora_name: Under which name requests find the adapter. With ``{version}`` in it each version has a name of its
            own, and the one before is unloaded; without, the adapter is replaced in place, between two forward passes,
            by a vLLM that knows ``load_inplace``.
        pause: What happens to requests while weights are replaced (vLLM's ``mode``).
        update_info: Makes what the server's weight-transfer backend expects in ``update_info``; for a server that was
            started with a backend of yours that reads the directory. By default vLLM itself reloads its weights from
            the directory, as it loaded them when it started.
        headers: Sent with each request.
    """

    url: str
    lora_name: str = "policy"
    pause: PauseMode = "keep"
    update_info: Callable[[Delivery], Mapping[str, object]] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    adapter_features: ClassVar = frozenset({"use_rslora", "lora_embedding"})

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

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """See `PolledEngine`."""
        if newest.kind == "adapter":
            return await adapter_served(connection, self.lora_name, newest)
        version = weight_version(await connection.get("/weight_info"))
        if connection.is_left_paused:
            # A process that was started anew is not.
            connection.is_left_paused = await self._is_paused(connection)
        return version

    async def _update(self, connection: EngineConnection, delivery: Delivery) -> int:
        if await self._is_paused(connection):
            # A trainer that is gone may have left it so in the middle of an update.
            connection.is_left_paused = True
        was_left_paused = connection.is_left_paused
        async with connection.resuming(lambda: connection.post("/resume")):
            await connection.pause("/pause", advice=_ADVICE, mode=self.pause, clear_cache="true")
            with connection.replacing(stays_paused=True):
                if self.update_info is None:
                    await self._reload(connection, delivery, is_repeated=was_left_paused)
                else:
                    info = self.update_info(delivery)
                    await self._transfer(connection, info, delivery.version, is_repeated=was_left_paused)
                # Of what was computed with the weights before, nothing is used any more; frozen requests begin again.
                emptied = await connection.post("/reset_prefix_cache", reset_running_requests="true")
                if emptied.body and emptied.json() != {"success": True}:
                    raise emptied.refusal("expected the prefix cache to be emptied")
            try:
                if self.update_info is None:
                    # The end of a session tells it for itself.
                    await connection.post("/update_weight_version", {"new_version": str(delivery.version)})
                answer = await connection.get("/weight_info")
            except EngineRefusedError as error:
                if error.status not in NO_ROUTE:
                    raise
                # Before 0.32 no route tells a version: each step has answered that it was done.
                return delivery.version
        return confirmed_weight_version(answer, delivery.version)

    @staticmethod
    async def _reload(connection: EngineConnection, delivery: Delivery, *, is_repeated: bool) -> None:
        """Has vLLM load its weights from the directory.

        A reload that raised leaves the weights of a layer that it had read, and the next one counts them as its own
        (``online_process_loader`` in vllm/model_executor/model_loader/reload/layerwise.py, 0.32). As a rule it raises
        as well, and so does every one after it. Where it does not, it may have mixed the two in one layer; having ended
        it keeps nothing, so one more is whole.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(delivery.directory)}}
        try:
            if is_repeated:
                await connection.post("/collective_rpc", body)
            await connection.post("/collective_rpc", body)
        except EngineRefusedError as error:
            if is_repeated:
                error.body = f"{error.body}; {_RESTART}"
            raise

    @staticmethod
    async def _is_paused(connection: EngineConnection) -> bool:
        try:
            answer = await connection.get("/is_paused")
        except EngineRefusedError as error:
            if error.status in NO_ROUTE:
                return False
            raise
        fields = answer.json()
        return isinstance(fields, dict) and fields.get("is_paused") is True

    @staticmethod
    async def _transfer(
        connection: EngineConnection, update_info: Mapping[str, object], version: int, *, is_repeated: bool
    ) -> None:
        """Has the server's backend load the weights, in a session of its own.

        A session that ended with an error leaves what it had read of a layer, as in `_reload`, and the next one fails.
        One that is finished without weights clears that: what it replaces is replaced once more.
        """
        try:
            await connection.post("/start_weight_update", {"is_checkpoint_format": True})
        except EngineRefusedError as error:
            if _IS_OPEN not in (error.body or ""):
                raise
            is_repeated = True  # A trainer that is gone has begun it.
        try:
            if is_repeated:
                await connection.post("/finish_weight_update", {})
                await connection.post("/start_weight_update", {"is_checkpoint_format": True})
            await connection.post("/update_weights", {"update_info": dict(update_info)})
            await connection.post("/finish_weight_update", {"weight_version": str(version)})
        except EngineRefusedError as error:
            if is_repeated:
                error.body = f"{error.body}; {_RESTART}"
            raise
