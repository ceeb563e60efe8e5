"""Stand-ins for inference servers: they follow the public contracts of their routes, and run no model.

A real server needs an accelerator and a model. What these do for real: speak HTTP, read the published files with
safetensors, take their time, refuse, hang and break connections. Sources of the contracts:

- vLLM: ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter`` answer in plain text, errors in JSON, and a name that
  is loaded is refused unless ``load_inplace`` (vllm/entrypoints/serve/lora, vllm/entrypoints/openai/models/serving.py;
  https://docs.vllm.ai/en/latest/features/lora/). ``/v1/models`` lists adapters with ``root`` and ``parent``.
  ``/pause`` and ``/resume`` answer ``{"status": ...}``, ``/start_weight_update``, ``/update_weights`` (``update_info``)
  and ``/finish_weight_update`` come in this order (vllm/entrypoints/serve/rlhf/api_router.py;
  https://docs.vllm.ai/en/latest/training/weight_transfer/).
- SGLang: ``/load_lora_adapter``, ``/unload_lora_adapter``, ``/update_weights_from_disk``, ``/pause_generation``,
  ``/continue_generation``, ``/model_info``, ``/server_info`` (python/sglang/srt/entrypoints/http_server.py,
  python/sglang/srt/managers/io_struct.py, 0.5.23). Failures answer 400 with ``success: false``. An unload waits for the
  requests of the adapter, and loads wait for it (managers/tokenizer_control_mixin.py). An update goes on where nobody
  waits for it any more; ``/server_info`` is answered after it, and a second one beside it ends the server
  (managers/tokenizer_manager.py). It then goes by the name of the weights' directory.
- SkyRL: ``/skyrl/v1/load_lora_adapter`` beside vLLM's routes
  (skyrl/backends/skyrl_train/inference_servers/vllm_server_actor.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from aiohttp import web
from safetensors.torch import load_file

BASE_MODEL = "base"
_POLL_S = 0.01


@dataclass
class StandIn:
    """One server. What it does is changed by its attributes, at any time.

    Attributes:
        load_s: How long a load takes.
        refusal: Status, content type and body of the answer to a load; ``None`` loads.
        is_hanging: Loads do not end.
        num_broken: So many connections end without an answer.
        routes: Requests so far, as method and path.
        is_half_replaced: Its weights are.
        has_leftovers: It keeps what a refused reload or update had read.
        is_mixed: Its weights are those of two versions.
        is_dead: It was resumed with weights that are half replaced.
    """

    gives_up: ClassVar[bool] = True
    """Whether a request ends where nobody waits for its answer any more."""

    load_s: float = 0.0
    refusal: tuple[int, str, str] | None = None
    is_hanging: bool = False
    num_broken: int = 0
    url: str = ""
    name: str = BASE_MODEL
    adapters: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    is_paused: bool = False
    weight_version: str = "default"
    update: list[str] = field(default_factory=list)
    is_half_replaced: bool = False
    has_leftovers: bool = False
    is_mixed: bool = False
    is_dead: bool = False
    routes: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def restart(self) -> None:
        """A process that has just begun: it serves the base model alone."""
        self.adapters, self.tensors, self.update = {}, {}, []
        self.weight_version = "default"
        self.is_paused = self.is_half_replaced = self.has_leftovers = self.is_mixed = self.is_dead = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._noting])
        app.add_routes([web.get("/v1/models", self._models), *self.own_routes()])
        return app

    def own_routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def let_go(self) -> None:
        """Keeps nobody waiting any longer."""
        self.is_hanging = False

    @web.middleware
    async def _noting(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        self.routes.append(f"{request.method} {request.path}")
        self.bodies.append(await request.json() if request.can_read_body else None)
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, _request: web.Request) -> web.Response:
        cards = [{"id": self.name, "object": "model", "root": self.name, "parent": None}]
        cards += [
            {"id": name, "object": "model", "root": path, "parent": self.name} for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def take_time(self, request: web.Request) -> web.Response | None:
        """What every load goes through; an answer if it does not come through."""
        if self.num_broken:
            self.num_broken -= 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        while self.is_hanging:
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(self.load_s)
        if self.refusal is not None:
            status, content_type, body = self.refusal
            return web.Response(status=status, content_type=content_type, text=body)
        return None

    def read_adapter(self, name: str, path: str) -> str | None:
        """Reads an adapter; says what is wrong with it."""
        try:
            json.loads((Path(path) / "adapter_config.json").read_text())["r"]
            tensors = load_file(Path(path) / "adapter_model.safetensors")
        except (OSError, KeyError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        self.adapters[name], self.tensors[name] = path, tensors
        return None

    def read_weights(self, path: str) -> str | None:
        """Reads all weights; says what is wrong with them."""
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            return f"no safetensors in {path}"
        self.tensors[BASE_MODEL] = {name: value for file in files for name, value in load_file(file).items()}
        return None


@dataclass
class VLLMStandIn(StandIn):
    def own_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/load_lora_adapter", self._load),
            web.post("/v1/unload_lora_adapter", self._unload),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/start_weight_update", self._start),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", self._finish),
            web.post("/collective_rpc", self._call),
            web.post("/reset_prefix_cache", self._reset_cache),
            web.post("/update_weight_version", self._name_version),
            web.get("/weight_info", self._weight_info),
            web.get("/is_paused", self._say_paused),
        ]

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            return _vllm_error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        if (refused := await self.take_time(request)) is not None:
            return refused
        wrong = self.read_adapter(body["lora_name"], body["lora_path"])
        if wrong is not None:
            return _vllm_error(404, wrong)
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _vllm_error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _pause(self, request: web.Request) -> web.Response:
        if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
            return web.json_response({"error": "mode"}, status=400)
        self.is_paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        self.is_paused = False
        # The next request would find parameters without memory, and end the engine.
        self.is_dead = self.is_dead or self.is_half_replaced
        return web.json_response({"status": "resumed"})

    async def _say_paused(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        self.is_half_replaced = True
        if (refused := await self.take_time(request)) is not None:
            self.has_leftovers = True
            return refused
        wrong = self.read_weights(body["kwargs"]["weights_path"])
        if wrong is not None:
            self.has_leftovers = True
            return web.json_response({"error": {"message": wrong}}, status=500)
        # What a refused one had read of a layer is counted as read by the next one.
        self.is_mixed, self.has_leftovers = self.has_leftovers, False
        self.is_half_replaced = False
        return web.json_response({"results": [None]})

    async def _reset_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": not self.is_paused or "reset_running_requests" in request.query})

    async def _name_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def _weight_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _start(self, _request: web.Request) -> web.Response:
        if self.update:
            message = "start_weight_update called while a weight update is already active. Call finish_weight_update"
            return web.json_response({"error": {"message": message}}, status=500)
        self.update = ["started"]
        self.is_half_replaced = True
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json()).get("update_info")
        if info is None or self.update != ["started"]:
            return web.json_response({"detail": "Missing 'update_info' in request body"}, status=400)
        if (refused := await self.take_time(request)) is not None:
            self.update, self.has_leftovers = [], True
            return refused
        wrong = "what is left of another one" if self.has_leftovers else self.read_weights(info["path"])
        if wrong is not None:
            self.update, self.has_leftovers = [], True
            return web.json_response({"error": wrong}, status=500)
        self.update.append("updated")
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, request: web.Request) -> web.Response:
        if not self.update:
            return web.json_response({"error": "no update"}, status=400)
        self.weight_version = (await request.json()).get("weight_version", self.weight_version)
        self.is_half_replaced, self.has_leftovers = self.update != ["started", "updated"], False
        self.update = []
        return web.json_response({"message": "Weight update finished"})


@dataclass
class SkyRLStandIn(VLLMStandIn):
    next_id: int = 1

    def own_routes(self) -> list[web.RouteDef]:
        return [*super().own_routes(), web.post("/skyrl/v1/load_lora_adapter", self._load_in_place)]

    async def _load_in_place(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body.get("lora_name") or not body.get("lora_path"):
            return web.json_response({"detail": "Both 'lora_name' and 'lora_path' must be provided."}, status=400)
        if (refused := await self.take_time(request)) is not None:
            return refused
        wrong = self.read_adapter(body["lora_name"], body["lora_path"])
        if wrong is not None:
            return web.json_response({"detail": wrong}, status=500)
        self.next_id += 1
        return web.json_response({"status": "ok", "lora_name": body["lora_name"], "lora_int_id": self.next_id})


@dataclass
class SGLangStandIn(StandIn):
    """SGLang.

    Attributes:
        in_use: Adapters that a request uses.
        is_updating: Whether an update of its weights is under way.
        lora_lock: Held while an adapter is loaded or unloaded.
    """

    gives_up = False

    in_use: set[str] = field(default_factory=set)
    is_updating: bool = False
    lora_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def own_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/load_lora_adapter", self._load),
            web.post("/unload_lora_adapter", self._unload),
            web.post("/update_weights_from_disk", self._update),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.get("/model_info", self._info),
            web.get("/server_info", self._server_info),
        ]

    def let_go(self) -> None:
        super().let_go()
        self.in_use.clear()

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self.lora_lock:
            if body["lora_name"] in self.adapters:
                return self._loaded(f"Failed to load LoRA adapter {body['lora_name']} because it is already loaded")
            if (refused := await self.take_time(request)) is not None:
                return refused
            return self._loaded(self.read_adapter(body["lora_name"], body["lora_path"]))

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        async with self.lora_lock:
            if self.adapters.pop(name, None) is None:
                return self._loaded(f"LoRA with name {name} does not exist")
            while name in self.in_use:
                await asyncio.sleep(_POLL_S)
            return self._loaded(None)

    def _loaded(self, wrong: str | None) -> web.Response:
        said = {"success": wrong is None, "error_message": wrong, "loaded_adapters": self.adapters}
        return web.json_response(said, status=200 if wrong is None else 400)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.is_dead = self.is_dead or self.is_updating
        self.is_updating = True
        try:
            if (refused := await self.take_time(request)) is not None:
                return refused
            wrong = self.read_weights(body["model_path"])
        finally:
            self.is_updating = False
        if wrong is None:
            self.weight_version, self.name = body["weight_version"], body["model_path"]
        return web.json_response(
            {
                "success": wrong is None,
                "message": wrong or "Succeeded to update model weights.",
                "num_paused_requests": 0,
            },
            status=200 if wrong is None else 400,
        )

    async def _server_info(self, _request: web.Request) -> web.Response:
        while self.is_updating:
            await asyncio.sleep(_POLL_S)
        return web.json_response({"internal_states": [{}]})

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] in ("abort", "retract", "in_place")
        self.is_paused = True
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _request: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.name, "weight_version": self.weight_version})


def _vllm_error(status: int, message: str) -> web.Response:
    kind = "NotFoundError" if status == 404 else "InvalidUserInput"
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@contextmanager
def serving(*stand_ins: StandIn) -> Iterator[None]:
    """Serves them on loopback, each on a port of its own that it keeps, on one thread."""
    loop = asyncio.new_event_loop()
    started: Future[None] = Future()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        for each in stand_ins:
            runner = web.AppRunner(each.app(), shutdown_timeout=0.1, handler_cancellation=each.gives_up)
            await runner.setup()
            # One that was served before comes back at its address.
            site = web.TCPSite(runner, "127.0.0.1", urlsplit(each.url).port or 0)
            await site.start()
            runners.append(runner)
            each.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        for each in stand_ins:
            each.let_go()
        for runner in runners:
            await runner.cleanup()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(start())
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        loop.run_forever()
        loop.run_until_complete(stop())
        loop.close()

    thread = threading.Thread(target=run, name="stand-ins")
    thread.start()
    try:
        started.result(60)
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def main() -> None:
    """``engine_servers.py NUM LOAD_S``: serves so many vLLM stand-ins, prints their URLs, ends with its input."""
    stand_ins = [VLLMStandIn(load_s=float(sys.argv[2])) for _ in range(int(sys.argv[1]))]
    with serving(*stand_ins):
        print(json.dumps([each.url for each in stand_ins]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
