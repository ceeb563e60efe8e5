"""vLLM: loads adapters with ``/v1/load_lora_adapter``, and weights with the weight-transfer routes.

Routes: https://docs.vllm.ai/en/latest/features/lora/ (``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``) and
https://docs.vllm.ai/en/latest/training/weight_transfer/ (``VLLM_SERVER_DEV_MODE=1``), as in
vllm/entrypoints/serve/lora/api_router.py and vllm/entrypoints/rl/online/api_router.py (0.32). vLLM answers a
successful load of an adapter with plain text. ``finish_weight_update`` sets ``weight_version`` when all workers are
done (``AsyncLLM.finish_weight_update``). How workers fetch weights themselves is described in ``vllm_backend.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeAlias

from ft_transport.credentials import Keys
from ft_transport.errors import ConfigurationError, EngineRefusedError
from ft_transport.publish.engines.adapters import adapter_served, deliver_adapter
from ft_transport.publish.engines.engine import (
    LEFT_PAUSED,
    NO_ROUTE,
    Delivery,
    EngineConnection,
    checked_url,
    confirmed_weight_version,
    weight_version,
)
from ft_transport.publish.engines.pulling import Order

_ADVICE: Final = (
    "vLLM loads weights only if it was started with VLLM_SERVER_DEV_MODE=1; publish a LoRA adapter as a LoRAAdapter"
)
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
_RESTART: Final = (
    "vLLM keeps data of an update that it has refused, and has refused the next update as well: restart this engine"
)
_BACKEND_ROUTE: Final = "/init_weight_transfer_engine"
"""The only route that passes a request to the weight-transfer backend of every worker without a session."""
_IS_OPEN: Final = "already active"
"""Part of vLLM's answer if an earlier weight update has not finished (``start_weight_update`` in gpu_worker.py)."""


@dataclass(frozen=True, slots=True)
class VLLMEngine:
    """A vLLM server.

    Attributes:
        url: Base URL of the server.
        lora_name: Name by which requests select the adapter. If the name contains ``{version}``, each version has its
            own name, and the previous version is unloaded. Otherwise vLLM replaces the adapter between two forward
            passes, which requires a vLLM that supports ``load_inplace``.
        pause: How the server treats running requests while weights are replaced (``mode`` of vLLM).
        update_info: For a server with a custom weight-transfer backend that reads the version's directory: a function
            that returns the backend's ``update_info``. Default: vLLM itself reloads the weights from the directory.
        headers: HTTP headers of each request.
        pulls: Whether the server's workers fetch weights from the publisher's transport, without a shared disk. For a
            server with this package and ``--weight-transfer-config '{"backend": "ft_transport"}'``.
    """

    url: str
    lora_name: str = "policy"
    pause: PauseMode = "keep"
    update_info: Callable[[Delivery], Mapping[str, object]] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    pulls: bool = False
    adapter_features: ClassVar = frozenset({"use_rslora", "lora_embedding"})
    _keys: Keys | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pulls and self.update_info is not None:
            raise ConfigurationError("expected pulls or update_info, got both: they belong to different backends")
        object.__setattr__(self, "url", checked_url(self.url))
        object.__setattr__(self, "_keys", Keys.from_environment() if self.pulls else None)

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Load an adapter or weights (`Engine.deliver`)."""
        if delivery.kind == "weights":
            return await self._update(connection, delivery)
        return await self._load(connection, delivery)

    async def _load(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Load an adapter."""
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
        """Return the version of the server's adapter or weights (`PolledEngine.served_version`)."""
        if newest.kind == "adapter":
            return await adapter_served(connection, self.lora_name, newest)
        version = weight_version(await connection.get("/weight_info"))
        if connection.link.is_left_paused:
            # A server that was restarted is not paused any more.
            connection.link.is_left_paused = await self._is_paused(connection)
        return version

    async def _update(self, connection: EngineConnection, delivery: Delivery) -> int:
        if await self._is_paused(connection):
            # A trainer that exited may have left the engine paused in the middle of an update.
            connection.link.is_left_paused = True
        was_left_paused = connection.link.is_left_paused
        if self.pulls:
            await self._fetch(connection, delivery)
        async with connection.resuming(lambda: connection.post("/resume")):
            await connection.pause("/pause", advice=_ADVICE, mode=self.pause, clear_cache="true")
            with connection.replacing(stays_paused=True):
                if self.pulls:
                    await self._load_fetched(connection, delivery.version)
                elif self.update_info is None:
                    await self._reload(connection, delivery, is_repeated=was_left_paused)
                else:
                    info = self.update_info(delivery)
                    await self._transfer(connection, info, delivery.version, is_repeated=was_left_paused)
                # Discards all results of the previous weights; requests that were paused start again.
                emptied = await connection.post("/reset_prefix_cache", reset_running_requests="true")
                if emptied.body and emptied.json() != {"success": True}:
                    raise emptied.refusal("expected the prefix cache to be emptied")
            try:
                if self.update_info is None:
                    # A weight-transfer session sets the version itself at its end.
                    await connection.post("/update_weight_version", {"new_version": str(delivery.version)})
                answer = await connection.get("/weight_info")
            except EngineRefusedError as error:
                if error.status not in NO_ROUTE:
                    raise
                # vLLM before 0.32 cannot report a version, but has answered each request with success.
                return delivery.version
        return confirmed_weight_version(answer, delivery.version)

    async def _fetch(self, connection: EngineConnection, delivery: Delivery) -> None:
        """Wait until all workers have fetched the version. Until they load it, they serve the previous version."""
        order = Order(version=delivery.version, address=await delivery.source(self.url))
        request = {"init_info": {"version": order.version, **order.body(self._keys)}}
        try:
            try:
                await connection.post(_BACKEND_ROUTE, request)
            except EngineRefusedError as error:
                if _IS_OPEN not in (error.body or ""):
                    raise
                # Another trainer, which has exited, began that update.
                await connection.post("/finish_weight_update", {})
                await connection.post(_BACKEND_ROUTE, request)
        except EngineRefusedError as error:
            if connection.link.is_left_paused:
                error.body = f"{error.body}; {LEFT_PAUSED}"
            raise

    @staticmethod
    async def _load_fetched(connection: EngineConnection, version: int) -> None:
        """Make all workers load the version that they have fetched, in a session.

        The requests of the session always succeed, so the last request asks for the outcome (`PullingBackend`).
        """
        await connection.post("/start_weight_update", {})
        await connection.post("/update_weights", {"update_info": {"version": version}})
        await connection.post("/finish_weight_update", {})
        await connection.post(_BACKEND_ROUTE, {"init_info": {"version": version}})

    @staticmethod
    async def _reload(connection: EngineConnection, delivery: Delivery, *, is_repeated: bool) -> None:
        """Make vLLM reload its weights from the directory, or reload them twice if an earlier reload may have failed.

        A failed reload leaves weights of a partly read layer in vLLM, and the next reload treats them as its own
        (``online_process_loader`` in vllm/model_executor/model_loader/reload/layerwise.py, 0.32). Usually the next
        reload fails as well, and so do all later ones. If the next reload succeeds, a layer may have weights of both
        versions, and correct weights need one more reload.

        Args:
            connection: Connection to the engine.
            delivery: The version to load.
            is_repeated: Whether an earlier reload may have failed.
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
        """Make the server's weight-transfer backend load the weights, in a session.

        A failed session leaves weights of a partly read layer in vLLM, as a failed reload does, and makes the next
        session fail. An empty session removes these weights, so a repeated update begins with an empty session.

        Args:
            connection: Connection to the engine.
            update_info: The argument of the backend.
            version: Number of the version.
            is_repeated: Whether an earlier session may have failed.
        """
        try:
            await connection.post("/start_weight_update", {"is_checkpoint_format": True})
        except EngineRefusedError as error:
            if _IS_OPEN not in (error.body or ""):
                raise
            is_repeated = True  # Another trainer, which has exited, began that update.
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


@dataclass(frozen=True, slots=True)
class SkyRLEngine(VLLMEngine):
    """An inference server of SkyRL: vLLM with a route that loads an adapter in place.

    ``POST /skyrl/v1/load_lora_adapter`` (skyrl/backends/skyrl_train/inference_servers/vllm_server_actor.py, 0.4.0)
    replaces the adapter with the same name; https://github.com/NovaSky-AI/SkyRL. All other routes are those of vLLM.
    This class does not use SkyRL's own ways to send weights: NCCL, CUDA IPC, RDT, and checkpoint deltas on a disk that
    trainer and server share, or in a bucket (``/fetch_weights``).

    Attributes:
        lora_name: Name by which requests select the adapter.
    """

    lora_name: str = "skyrl-lora"

    async def _load(self, connection: EngineConnection, delivery: Delivery) -> int:
        async def load(name: str, _is_taken: bool) -> None:
            body = {"lora_name": name, "lora_path": str(delivery.directory)}
            answer = await connection.post("/skyrl/v1/load_lora_adapter", body)
            fields = answer.json()
            if not isinstance(fields, dict) or fields.get("status") != "ok":
                raise answer.refusal("expected the status ok")

        return await deliver_adapter(connection, delivery, self.lora_name, load)
