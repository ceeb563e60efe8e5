"""A publisher that keeps only what engines use, and adapters for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from engine_servers import SGLangStandIn, SkyRLStandIn, StandIn, VLLMStandIn, serving

from ft_transport import (
    HTTPTransport,
    LoRAAdapter,
    Publisher,
    PullingEngine,
    SGLangEngine,
    SkyRLEngine,
    VLLMEngine,
    WeightReceiver,
)

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": {"q", "v"}}


def adapter(version: int) -> LoRAAdapter:
    name = "base_model.model.layers.0.q.lora_{}.weight"
    tensors = {name.format("A"): torch.full((4, 8), float(version)), name.format("B"): torch.ones(8, 4)}
    return LoRAAdapter(tensors, CONFIG)


def engine_of(stand_in: StandIn, **keywords: Any) -> Any:
    kinds: list[tuple[type[StandIn], Any]] = [
        (SkyRLStandIn, SkyRLEngine),
        (VLLMStandIn, VLLMEngine),
        (SGLangStandIn, SGLangEngine),
    ]
    return next(engine for kind, engine in kinds if isinstance(stand_in, kind))(stand_in.url, **keywords)


@contextmanager
def publishing(root: Path, *stand_ins: StandIn, **keywords: Any) -> Iterator[Publisher]:
    chosen: Any = {"keep_for": timedelta(0), **keywords}
    with serving(*stand_ins), Publisher([engine_of(each) for each in stand_ins], root, **chosen) as publisher:
        yield publisher


@contextmanager
def pulling(
    root: Path, transport: HTTPTransport[Any], own: Any, **keywords: Any
) -> Iterator[tuple[Publisher, WeightReceiver]]:
    """A publisher, and the receiver of its one engine, which has the weights ``own``."""
    with (
        WeightReceiver(own, host="127.0.0.1", **keywords) as receiver,
        Publisher([PullingEngine(receiver.url)], root, transport=transport) as publisher,
    ):
        yield publisher, receiver
