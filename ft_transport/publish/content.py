"""The content of a version on one rank: the trainer's tensors under the engines' names, and the other files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import nn

from ft_transport.errors import PublishError
from ft_transport.publish.adapter import LoRAAdapter, is_adapter
from ft_transport.publish.engines.engine import Kind
from ft_transport.publish.names import Renamed, engine_names, unwrapped
from ft_transport.publish.peft_config import CONFIG_NAME
from ft_transport.publish.weight_format import WeightFormat
from ft_transport.state.casting import CASTABLE

Weights: TypeAlias = LoRAAdapter | Mapping[str, torch.Tensor]

_OF_PEFT: Final = re.compile(r"^base_model\.model\.|(?:^|\.)(?:base_layer|lora_(?:embedding_)?[AB])(?:\.|$)")
"""Names of PEFT's wrappers, and of the modules and tensors inside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a version on this rank.

    Attributes:
        kind: Kind of the version.
        tensors: Whole tensors, or DTensors of which each rank has a part, by the engines' names.
        files: The kind's other files in the directory, by name; the same on all ranks.
        renamed: The engines' names of the trainer's tensors, if they differ from the trainer's.
    """

    kind: Kind
    tensors: Mapping[str, object]
    files: Mapping[str, bytes] = field(default_factory=dict)
    renamed: Renamed = field(default_factory=dict)


def content_of(weights: Weights | Callable[[], Weights], weight_format: WeightFormat) -> Content:
    """Return the content to publish on this rank.

    Raises:
        PublishError: The weights contain nothing that an engine could use, or do not fit the format.
        ConfigurationError: No plain adapter has the adapter's effect.
    """
    # A module is also callable.
    value: object = weights() if callable(weights) and not isinstance(weights, nn.Module) else weights
    if isinstance(value, LoRAAdapter):
        value = value.plain(weight_format.dtype)
        tensors, renamed = _formatted(value.tensors, weight_format)
        if renamed and not is_adapter(tensors):
            other = next(name for name in tensors if not is_adapter([name]))
            raise PublishError("expected names of LoRA's matrices for those of an adapter", path=other)
        files = {CONFIG_NAME: value.encoded_config()}
        return Content(kind="adapter", tensors=tensors, files=files, renamed=renamed)
    if isinstance(value, nn.Module):
        raise PublishError(
            f"expected a LoRAAdapter or weights by name, got a module, {type(value).__name__}; pass its state_dict(), "
            "or LoRAAdapter.of(module, config)"
        )
    if not isinstance(value, Mapping):
        raise PublishError(f"expected a LoRAAdapter or weights by name, got {type(value).__name__}")
    if not value:
        raise PublishError("expected a LoRAAdapter or weights by name, got no weights")
    if is_adapter(value):
        raise PublishError(
            "expected all weights of a model, or a LoRAAdapter, got LoRA's matrices alone, which engines take for no "
            "model; pass LoRAAdapter(tensors, config), or LoRAAdapter.of(module, config)",
            path=next(iter(value)),
        )
    tensors, renamed = _formatted(unwrapped(value), weight_format)
    for name in tensors:
        if _OF_PEFT.search(name):
            raise PublishError(
                "expected the weights of a model by the names that engines know, got those of a PEFT model, whose "
                "adapter engines would leave out; pass LoRAAdapter.of(model, config), or the state_dict() of a copy "
                "with the adapter merged (merge_and_unload), or rename them all with WeightFormat(names=...)",
                path=name,
            )
    return Content(kind="weights", tensors=tensors, renamed=renamed)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or any("\ud800" <= character <= "\udfff" for character in name):
        raise PublishError(
            f"expected the name of each tensor to be text, not empty and without lone surrogates, got {name!r}"
        )


def _formatted(tensors: Mapping[str, object], weight_format: WeightFormat) -> tuple[Mapping[str, object], Renamed]:
    renamed: Renamed = {}
    if weight_format.names is not None:
        renamed = engine_names(list(tensors), weight_format.names)
        tensors = {new: tensors[name] for name, new in renamed.items() if new is not None}
        if not tensors:
            raise PublishError(f"expected names for some of {len(renamed)} tensors, got None for all")
    for name in tensors:
        _check_name(name)
    if weight_format.dtype is not None:
        for name, tensor in tensors.items():
            dtype = getattr(tensor, "dtype", None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype not in CASTABLE:
                raise PublishError(
                    f"expected tensors that can be cast to {weight_format.dtype} without their scales, got {dtype}; "
                    "publish quantized weights without a dtype",
                    path=name,
                )
    return tensors, renamed
