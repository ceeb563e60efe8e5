"""SGLang: adapters by ``/load_lora_adapter``, weights by ``/update_weights_from_disk``.

Routes: https://docs.sglang.io/advanced_features/sglang_for_rl.html and
https://docs.sglang.io/advanced_features/lora.html, as in python/sglang/srt/entrypoints/http_server.py (0.5.23).
Failures answer 400 with ``success: false``.
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
        lora_name: Name by which requests select the adapter, with ``{version}`` in it: SGLang refuses a name that is
            already loaded. Earlier versions are unloaded, see ``unload_after``.
        pause: How the server treats requests while weights are replaced (SGLang's ``mode``).
        headers: Sent with each request.
        unload_after: How long an adapter stays loaded after the next one was written; longer than a request runs.
            SGLang's unload waits for the requests that use the adapter, and meanwhile it loads no other one.
    """

    url: str
    lora_name: str = "policy-{version}"
    pause: Literal["abort", "retract", "in_place"] = "retract"
    headers: Mapping[str, str] = field(default_factory=dict)
    unload_after: timedelta = timedelta(minutes=10)
    adapter_features: ClassVar = frozenset({"lora_embedding"})
    # SGLang silently drops modules outside of layers, and the first request for k_proj or v_proj alone raises in its
    # scheduler (sglang/srt/lora/lora.py, ``_process_weight``; mem_pool.py, ``load_lora_weight_to_buffer``).
    adapter_gaps: ClassVar = MODULE_FEATURES

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        check_duration("unload_after", self.unload_after, at_least=timedelta(0))

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`."""
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
        """See `PolledEngine`."""
        if newest.kind == "adapter":
            return await adapter_served(connection, self.lora_name, newest)
        return weight_version(await _get(connection, *_MODEL_INFO))

    async def _update(self, connection: EngineConnection, delivery: Delivery) -> int:
        async with connection.resuming(lambda: connection.post("/continue_generation", {})):
            if self.pause == "abort":
                # A server that a trainer left paused in place makes no step, and a request needs a step to end.
                await connection.pause("/continue_generation", {}, advice=_ADVICE)
            await connection.pause("/pause_generation", {"mode": self.pause}, advice=_ADVICE)
            await _end_of_updates(connection)
            body = {
                "model_path": str(delivery.directory),
                "weight_version": str(delivery.version),
                # Requests that are paused in place use the cache, so it cannot be emptied.
                "flush_cache": self.pause != "in_place",
            }
            with connection.replacing(stays_paused=False):
                _check(await connection.post("/update_weights_from_disk", body))
        return confirmed_weight_version(await _get(connection, *_MODEL_INFO), delivery.version)


async def _end_of_updates(connection: EngineConnection) -> None:
    """Wait for an update that an earlier trainer started, and then exited or stopped waiting for.

    While generation is paused SGLang takes the answer to that update for the answer to the next, confirms weights that
    it has not read yet, and exits at the second answer (``_handle_update_weights_from_disk_req_output`` in
    managers/tokenizer_manager.py). Its scheduler handles one request after the other, and answers this one after the
    update.
    """
    try:
        await _get(connection, "/server_info", "/get_server_info")
    except EngineRefusedError as error:
        if error.status not in NO_ROUTE:
            raise


async def _get(connection: EngineConnection, path: str, older_path: str) -> Answer:
    """Send a GET request to a route that older servers have under another path."""
    try:
        return await connection.get(path)
    except EngineRefusedError as error:
        if error.status not in NO_ROUTE:
            raise
        return await connection.get(older_path)


def _check(answer: Answer) -> None:
    """Refuse ``success: false``, which may come with a status of 200."""
    fields = answer.json()
    if not isinstance(fields, dict) or fields.get("success") is not True:
        raise answer.refusal("expected success")
