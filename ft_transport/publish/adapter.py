"""LoRA adapters in the layout that PEFT saves and engines load: ``adapter_model.safetensors``, ``adapter_config.json``.

Layout: https://huggingface.co/docs/peft/developer_guides/checkpoint; names begin with ``base_model.model.`` and do not
contain the adapter's own name (peft/utils/save_and_load.py, ``get_peft_model_state_dict``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn

from ft_transport.errors import ConfigurationError
from ft_transport.publish.names import modules_by_name, parameters_by_name
from ft_transport.publish.peft_config import is_of_experts, module_of, plain_adapter, rank_of, scale_of

_REQUIRED: Final = ("r", "lora_alpha", "target_modules")
_PREFIX: Final = "base_model.model."
_KIND: Final = re.compile(r"(?:^|\.)(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)\.")


class PEFTConfig(Protocol):
    """PEFT's ``LoraConfig``."""

    def to_dict(self) -> dict[str, Any]:
        """Returns its fields."""


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """An adapter; the trainer owns its tensors, and ``Publisher.publish`` copies them.

    Attributes:
        tensors: Tensors by the names that PEFT gives them in a file, whole or DTensors.
        config: PEFT's ``LoraConfig`` as a dict: ``r``, ``lora_alpha`` and ``target_modules``, without which no engine
            loads it, ``peft_type``, ... .

    Raises:
        ConfigurationError: Names the missing field.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        config: object = self.config
        if not isinstance(config, Mapping):
            raise ConfigurationError(
                f"expected PEFT's LoraConfig as a dict, such as peft_config.to_dict(), got {type(config).__name__}"
            )
        missing = [name for name in _REQUIRED if config.get(name) is None]
        if missing:
            raise ConfigurationError(
                f"expected {', '.join(_REQUIRED)} in the adapter's configuration, without which engines refuse it; "
                f"missing: {', '.join(missing)}"
            )
        tensors: object = self.tensors
        if not isinstance(tensors, Mapping) or not tensors:
            what = "none" if isinstance(tensors, Mapping) else type(tensors).__name__
            raise ConfigurationError(f"expected an adapter's tensors by name, got {what}")
        for name in ("r", *(["rank_pattern"] if config.get("rank_pattern") else [])):
            given = config[name].values() if name == "rank_pattern" else [config[name]]
            if any(not isinstance(rank, int) or rank < 1 for rank in given):
                raise ConfigurationError(f"expected ranks of at least 1 in {name}, got {config[name]!r}")
        for name, tensor in tensors.items():
            self._check_rank(name, tensor)

    @classmethod
    def of(cls, module: nn.Module, config: Mapping[str, Any] | PEFTConfig, name: str = "default") -> LoRAAdapter:
        """Return the adapter in a module that PEFT, or a library with the same parameter names, has changed.

        Ignores wrappers: ``torch.compile``, activation checkpointing, FSDP, DistributedDataParallel.

        Args:
            module: A module with parameters such as ``layer.lora_A.default.weight``. Nothing else in it may be trained:
                engines would serve the base model's value.
            config: PEFT's ``LoraConfig``, or its fields; see ``config``.
            name: Name of the adapter, if the module has several.

        Raises:
            ConfigurationError: The module has no such parameters, trains one that no engine applies, applies another
                adapter at the same time, or has other ranks or scales than the configuration.
        """
        fields = config if isinstance(config, Mapping) else config.to_dict()
        # The model's value applies to a field that the user's dict lacks, such as init_lora_weights.
        known: Any = next((part.peft_config for part in module.modules() if hasattr(part, "peft_config")), {})
        fields = {**(known[name].to_dict() if name in known else {}), **fields}
        tensors = {}
        for parameter_name, parameter in parameters_by_name(module):
            match = _KIND.search(parameter_name)
            if match is None:
                if parameter.requires_grad:
                    raise ConfigurationError(
                        f"expected LoRA's matrices alone to be trained, and {parameter_name} is as well, which no "
                        "engine takes from an adapter; freeze it, pass the part of the model that engines serve, or "
                        "publish all weights"
                    )
                continue
            rest = parameter_name[match.end() :].split(".")
            # Other adapters' parameters are skipped; without adapter names, all belong to this one.
            if rest[0] == name:
                rest = rest[1:]
            elif rest[0] != "weight":
                continue
            if match[1] == "lora_magnitude_vector":
                rest = [part for part in rest if part != "weight"]
            file_name = ".".join([parameter_name[: match.end() - 1], *rest])
            if not file_name.startswith(_PREFIX):
                file_name = _PREFIX + file_name
            tensors[file_name] = parameter.detach()
        if not tensors:
            raise ConfigurationError(
                f"expected parameters of the LoRA adapter {name!r}, such as layer.lora_A.{name}.weight, found none in "
                f"{type(module).__name__}"
            )
        adapter = cls(tensors, fields)
        for layer_name, layer in modules_by_name(module):
            adapter._check_layer(layer_name.removeprefix(_PREFIX), layer, name)
        return adapter

    def plain(self, dtype: torch.dtype | None) -> LoRAAdapter:
        """Return the adapter of the same effect that every engine applies; see `plain_adapter`."""
        return LoRAAdapter(*plain_adapter(self.tensors, self.config, dtype))

    def encoded_config(self) -> bytes:
        """Return the content of ``adapter_config.json``.

        Raises:
            ConfigurationError: JSON cannot represent a value.
        """
        config = {"peft_type": "LORA", **self.config}
        try:
            text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"expected an adapter's configuration that JSON can say: {error}") from error
        return text.encode()

    def _check_rank(self, name: object, tensor: torch.Tensor) -> None:
        module, kind = (module_of(name) if isinstance(name, str) else None) or ("", "")
        dim = {"A": 0, "B": 1}.get(kind[-1:])
        if dim is None or is_of_experts(module) or (dim == 1 and tensor.ndim == 1):
            return
        rank = rank_of(self.config, module)
        if tensor.ndim < 2 or tensor.shape[dim] != rank:
            raise ConfigurationError(
                f"expected the rank {rank} that the configuration gives {name}, got the shape {tuple(tensor.shape)}; "
                "pass the configuration of this adapter, model.peft_config[name]"
            )

    def _check_layer(self, module: str, layer: nn.Module, name: str) -> None:
        """Compare one of PEFT's layers with the configuration."""
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, Mapping) or name not in scaling:
            return
        active = getattr(layer, "active_adapters", ())
        if name in active and len(active) > 1:
            raise ConfigurationError(
                f"expected one active adapter, got {', '.join(active)} in {module}: the model adds all of them, and an "
                "engine only the one that is published; make one of them (PEFT's add_weighted_adapter with "
                f'combination_type="cat"), or activate {name!r} alone'
            )
        expected = scale_of(self.config, module)
        # Patterns name the parameters of experts, and not their layer.
        if not self.config.get("target_parameters") and not math.isclose(scaling[name], expected, rel_tol=1e-6):
            raise ConfigurationError(
                f"expected the scale {expected:g} that the configuration gives {module}, the layer has "
                f"{scaling[name]:g}; pass the configuration of this adapter, model.peft_config[{name!r}]"
            )


def is_adapter(names: Iterable[object]) -> bool:
    """Return whether these are names of LoRA matrices only."""
    return all(isinstance(name, str) and module_of(name) is not None for name in names)


def _plain(value: object) -> object:
    """Convert PEFT's own values: sets of module names, and enumerations of strings."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "value"):
        return value.value
    raise TypeError(f"{type(value).__name__} {value!r}")
