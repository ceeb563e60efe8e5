"""SGLang: loads adapters with ``/load_lora_adapter``, and weights with ``/update_weights_from_disk``.

Routes: https://docs.sglang.io/advanced_features/sglang_for_rl.html and
https://docs.sglang.io/advanced_features/lora.html, as in python/sglang/srt/entrypoints/http_server.py (0.5.23). SGLang
answers a failed request with status 400 and ``success: false``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Final, Literal

from ft_transport.errors import EngineRefusedError
from ft_transport.publish.adapter import MODULE_FEATURES
from ft_transport.publish.engines.adapters import adapter_served, deliver_adapter
from ft_transport.publish.engines.engine import (
    NO_ROUTE,
    Answer,
    Delivery,
    EngineConnection,
    checked_url,
    confirmed_weight_version,
    weight_version,
)
from ft_transport.settings import check_duration

_MODEL_INFO: Final = ("/model_info", "/get_model_info")
_ADVICE: Final = "this SGLang takes no weights at run time; publish a LoRA adapter as a LoRAAdapter"


@dataclass(frozen=True, slots=True)
class SGLangEngine:
    """An SGLang server.

    Attributes:
        url: Base URL of the server.
        lora_name: Name by which requests select the adapter. The name should contain ``{version}``, because SGLang
            refuses to load an adapter under the name of a loaded adapter.
        pause: How the server treats running requests while weights are replaced (``mode`` of SGLang).
        headers: HTTP headers of each request.
        unload_after: How long an adapter stays loaded after the next version was written. Choose a time longer than the
            longest request: before SGLang unloads an adapter, it waits for the requests that use the adapter, and
            meanwhile loads no other adapter.
    """

    url: str
    lora_name: str = "policy-{version}"
    pause: Literal["abort", "retract", "in_place"] = "retract"
    headers: Mapping[str, str] = field(default_factory=dict)
    unload_after: timedelta = timedelta(minutes=10)
    adapter_features: ClassVar = frozenset({"lora_embedding"})
    # SGLang silently ignores matrices of modules outside of layers. With an adapter of k_proj or v_proj but not q_proj,
    # its scheduler raises at the first request (sglang/srt/lora/lora.py, ``_process_weight``; mem_pool.py,
    # ``load_lora_weight_to_buffer``).
    adapter_gaps: ClassVar = MODULE_FEATURES

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        check_duration("unload_after", self.unload_after, at_least=timedelta(0))

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Load an adapter or weights (`Engine.deliver`)."""
        if delivery.kind == "weights":
            return await self._update(connection, delivery)

        async def unload(name: str) -> None:
            _check(await connection.post("/unload_lora_adapter", {"lora_name": name}))

        async def load(name: str, is_taken: bool) -> None:
            if is_taken:
                await unload(name)
            body = {"lora_name": name, "lora_path": str(delivery.directory), "pinned": False}
            _check(await connection.post("/load_lora_adapter", body))

        return await deliver_adapter(connection, delivery, self.lora_name, load, unload, unload_after=self.unload_after)

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """Return the version of the server's adapter or weights (`PolledEngine.served_version`)."""
        if newest.kind == "adapter":
            return await adapter_served(connection, self.lora_name, newest)
        return weight_version(await _get(connection, *_MODEL_INFO))

    async def _update(self, connection: EngineConnection, delivery: Delivery) -> int:
        async with connection.resuming(lambda: connection.post("/continue_generation", {})):
            if self.pause == "abort":
                # A server that was left paused with in_place makes no steps, and an aborted request needs one to end.
                await connection.pause("/continue_generation", {}, advice=_ADVICE)
            await connection.pause("/pause_generation", {"mode": self.pause}, advice=_ADVICE)
            await _end_of_updates(connection)
            body = {
                "model_path": str(delivery.directory),
                "weight_version": str(delivery.version),
                # Requests that are paused with in_place still use the cache, so SGLang cannot empty it.
                "flush_cache": self.pause != "in_place",
            }
            with connection.replacing(stays_paused=False):
                _check(await connection.post("/update_weights_from_disk", body))
        return confirmed_weight_version(await _get(connection, *_MODEL_INFO), delivery.version)


async def _end_of_updates(connection: EngineConnection) -> None:
    """Wait until the server has finished an earlier update, which a trainer that has exited may have started.

    If a second update starts during the first, SGLang takes the result of the first for that of the second. Then it
    confirms weights that it has not read yet, and exits at the second result
    (``_handle_update_weights_from_disk_req_output`` in managers/tokenizer_manager.py). The scheduler handles requests
    in order, so the response to the request sent here arrives after the update.
    """
    try:
        await _get(connection, "/server_info", "/get_server_info")
    except EngineRefusedError as error:
        if error.status not in NO_ROUTE:
            raise


async def _get(connection: EngineConnection, path: str, older_path: str) -> Answer:
    """Send a GET request to ``path``. If the server does not have this route, use ``older_path``."""
    try:
        return await connection.get(path)
    except EngineRefusedError as error:
        if error.status not in NO_ROUTE:
            raise
        return await connection.get(older_path)


def _check(answer: Answer) -> None:
    """Raise an error for a response without ``success: true``, because SGLang may report failures with status 200."""
    fields = answer.json()
    if not isinstance(fields, dict) or fields.get("success") is not True:
        raise answer.refusal("expected success")
