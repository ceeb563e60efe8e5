"""Nothing on the path of a step waits for the cyclic collector, which large runs turn off."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, lighthouse, make_manager, run_replicas

from manager import GlooProcessGroup

pytest.importorskip("torchft")

pytestmark = pytest.mark.usefixtures("quorum_ready")

_NUM_STEPS = 6
_FAILING = 11
"""Of two collectives a step: in the first half of the steps that are looked at."""
_GLOO_TIMEOUT = timedelta(seconds=5)
_OURS = ("manager", "ft_transport")


class _Failing:
    """Stands in for a work of gloo that was lost (``Work::wait`` in torch's Work.cpp)."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("connection lost")


class _FailingGroup(GlooProcessGroup):
    """Fails in one collective; both replicas count alike."""

    num_collectives = 0

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.num_collectives += 1
        return _Failing() if self.num_collectives == _FAILING else super().allreduce(tensors, opts)


def _is_ours(thing: object) -> bool:
    module = getattr(thing, "__module__", None) or getattr(type(thing), "__module__", None) or ""
    return isinstance(thing, (torch.Tensor, torch.futures.Future)) or str(module).partition(".")[0] in _OURS


@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize("kind", ["own", "own, failing", "ddp"])
def test_gradients_and_works_go_away_with_the_collector_off(kind: str, use_async_quorum: bool) -> None:
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    found: list[object] = []

    def replica(index: int, address: str) -> list[weakref.ref[torch.Tensor]]:
        manager = make_manager(
            address,
            f"replica_{index}",
            pg=_FailingGroup(timeout=_GLOO_TIMEOUT) if "failing" in kind else None,
            min_replica_size=2,
            use_async_quorum=use_async_quorum,
        )
        model = torch.nn.Linear(64, 64)
        inner = torch.optim.AdamW(model.parameters())
        manager.register("model", model)
        manager.register("optimizer", inner)
        manager.attach(inner)
        wrapped: Any = DistributedDataParallel(manager, model) if kind == "ddp" else model
        optimizer = OptimizerWrapper(manager, inner)

        def step() -> list[weakref.ref[torch.Tensor]]:
            optimizer.zero_grad()
            wrapped(torch.ones(2, 64)).sum().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if kind != "ddp":
                for gradient in gradients:
                    manager.allreduce(gradient).get_future().then(lambda done: done.value())
            optimizer.step()
            return [weakref.ref(gradient) for gradient in gradients]

        gradients = [gradient for _ in range(3) for gradient in step()]
        if both.wait(LONG_S) == 0:
            # What an earlier test left: DDP keeps its manager in C++, so that it goes in a later collection.
            while gc.collect():
                pass
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
        both.wait(LONG_S)
        for _ in range(_NUM_STEPS):
            gradients += step()
        # Those of the last step are the parameters' own. gloo keeps the tensor of a collective whose connection has
        # ended until it notices that, and at times it does not: then until its timeout.
        deadline_s = time.monotonic() + 4 * _GLOO_TIMEOUT.total_seconds()
        while (num_alive := sum(reference() is not None for reference in gradients)) > len(list(model.parameters())):
            assert time.monotonic() < deadline_s, f"{num_alive} gradients are alive"
        if both.wait(LONG_S) == 0:
            gc.collect()
            found.extend(gc.garbage)
        both.wait(LONG_S)
        manager.shutdown()
        return gradients

    def unless_broken(index: int, address: str) -> object:
        try:
            return replica(index, address)
        except threading.BrokenBarrierError:
            return None  # the other one raises why
        except BaseException:
            both.abort()
            raise

    both = threading.Barrier(2)
    try:
        with lighthouse(min_replicas=2) as address:
            run_replicas(lambda: unless_broken(0, address), lambda: unless_broken(1, address))
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert [thing for thing in found if _is_ours(thing)] == []
