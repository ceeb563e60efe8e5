"""Workers of vLLM with this package's weight-transfer backend, on threads, where vLLM is not installed.

They keep to what the backend uses of vLLM 0.32: the base class and the factory of vllm/distributed/weight_transfer, the
layerwise reload (vllm/model_executor/model_loader/reload), the groups of vllm/distributed/parallel_state.py, the
session of vllm/v1/worker/gpu_worker.py, and the queues of responses of vllm/v1/executor/multiproc_executor.py, which
keep what was not read after an error.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from aiohttp import web
from engine_servers import VLLMStandIn

MODULE = "ft_transport.publish.vllm_backend"
_AGREE_S = 30.0
_I = TypeVar("_I")
_U = TypeVar("_U")
_here = threading.local()


class WeightTransferEngine(Generic[_I, _U]):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, None


class Factory:
    _registry: dict[str, Any] = {}  # noqa: RUF012 - vLLM's

    @classmethod
    def register_engine(cls, name: str, engine: Any) -> None:
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = engine


class Model:
    """A worker's part of a model.

    Attributes:
        weights: What a forward pass would use; ``None`` between the two ends of a reload.
        loads: The names that each load has brought.
        failure: What the next load ends with, half way.
        increment: Added to each tensor that a load is given, in place.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights: dict[str, torch.Tensor] | None = {name: each.clone() for name, each in weights.items()}
        self.loads: list[list[str]] = []
        self.failure: Exception | None = None
        self.increment = 0.0
        self._stored = self.weights

    def initialize(self) -> None:
        self.weights = None

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert self.weights is None, "loaded outside of a reload"
        self.loads.append([])
        for name, tensor in weights:
            if self.increment:
                tensor += self.increment  # noqa: PLW2901
            self._stored[name].copy_(tensor)
            self.loads[-1].append(name)
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure

    def finalize(self, _config: object) -> None:
        self.weights = self._stored


class Exchange:
    """The values of all workers."""

    def __init__(self, num_workers: int) -> None:
        self._values: list[Any] = [None] * num_workers
        self._barrier = threading.Barrier(num_workers)

    def gather(self, value: Any) -> list[Any]:
        self._values[_here.rank] = value
        self._barrier.wait(_AGREE_S)
        values = list(self._values)
        self._barrier.wait(_AGREE_S)
        return values


@contextmanager
def backend_module(num_workers: int) -> Iterator[ModuleType]:
    """The module of the backend, imported with stand-ins for what it imports of vLLM."""
    exchange = Exchange(num_workers)

    def all_reduce(value: torch.Tensor, op: object, group: Exchange | None) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        if group is not None:
            value.fill_(max(group.gather(int(value))))

    def all_gather(values: list[torch.Tensor], value: torch.Tensor, group: Exchange) -> None:
        for own, given in zip(values, group.gather(value), strict=True):
            own.copy_(given)

    alone = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    names: dict[str, dict[str, Any]] = {
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: SimpleNamespace(
                rank_in_group=_here.rank, world_size=num_workers, cpu_group=exchange
            ),
            "get_pp_group": lambda: alone,
            "get_pcp_group": lambda: alone,
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": Model.initialize,
            "finalize_layerwise_reload": Model.finalize,
        },
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, values in names.items():
            parts = name.split(".")
            for length in range(1, len(parts)):
                patched.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
            module = ModuleType(name)
            module.__dict__.update(values)
            patched.setitem(sys.modules, name, module)
        patched.setattr(Factory, "_registry", {})
        patched.setattr(torch.distributed, "all_reduce", all_reduce)
        patched.setattr(torch.distributed, "all_gather", all_gather)
        patched.delitem(sys.modules, MODULE, raising=False)
        imported = importlib.import_module(MODULE)
        yield imported
        del sys.modules[MODULE]


class Workers:
    """All workers of a server.

    Args:
        module: The module of the backend.
        weights: Of the model, in each worker.
        num_workers: How many.
    """

    def __init__(self, module: Any, weights: Mapping[str, torch.Tensor], num_workers: int = 1) -> None:
        self.models = [Model(weights) for _ in range(num_workers)]
        self.backends = [module.PullingBackend(None, None, None, model) for model in self.models]
        self._are_open = [False] * num_workers
        self._responses: list[deque[Exception | None]] = [deque() for _ in range(num_workers)]

    def call(self, method: str, argument: Any = None) -> None:
        """Calls a method of all workers; raises the first error, and leaves the responses after it unread."""
        with ThreadPoolExecutor(len(self.models)) as pool:
            list(pool.map(lambda rank: self._run(rank, method, argument), range(len(self.models))))
        for responses in self._responses:
            if (error := responses.popleft()) is not None:
                raise RuntimeError(f"Worker failed with error '{error}'")

    def shutdown(self) -> None:
        """Frees what the workers have fetched, as vLLM does when it ends."""
        for backend in self.backends:
            backend.shutdown()

    def _run(self, rank: int, method: str, argument: Any) -> None:
        _here.rank = rank
        try:
            self._work(rank, self.backends[rank], method, argument)
            self._responses[rank].append(None)
        except Exception as error:
            self._responses[rank].append(error)

    def _work(self, rank: int, backend: Any, method: str, argument: Any) -> None:
        if method == "init":
            backend.init_transfer_engine(backend.parse_init_info(argument))
            return
        if self._are_open[rank] == (method == "start"):
            raise RuntimeError("a weight update is already active" if method == "start" else "without a start")
        if method == "start":
            backend.start_weight_update()
        elif method == "update":
            backend.update_weights(argument)
        else:
            backend.finish_weight_update()
        self._are_open[rank] = method != "finish"


@dataclass
class PullingStandIn(VLLMStandIn):
    """A server with such workers."""

    workers: Workers = field(kw_only=True)

    def own_routes(self) -> list[web.RouteDef]:
        routes = {
            "/init_weight_transfer_engine": ("init", "init_info"),
            "/start_weight_update": ("start", None),
            "/update_weights": ("update", "update_info"),
            "/finish_weight_update": ("finish", None),
        }

        def handler(method: str, key: str | None) -> Any:
            async def handle(request: web.Request) -> web.Response:
                body = await request.json()
                try:
                    await asyncio.to_thread(self.workers.call, method, body[key] if key is not None else None)
                except RuntimeError as error:
                    return web.json_response({"error": {"message": str(error)}}, status=500)
                return web.json_response({"message": "done"})

            return handle

        others = [each for each in super().own_routes() if each.path not in routes]
        return [*others, *(web.post(path, handler(*what)) for path, what in routes.items())]
