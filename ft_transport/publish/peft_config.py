"""PEFT's LoRA configuration: ranks and scales, features beyond plain LoRA, and the equivalent plain adapter.

A plain adapter adds ``lora_alpha / r * B @ A`` to weights of the unmodified base model, with one rank. Every engine
applies that. SGLang 0.5.23 reads no other field but ``use_dora`` (sglang/srt/lora/lora.py, ``scaling``), and vLLM 0.23,
which SkyRL 0.3.0 pins, no pattern (vllm/lora/peft_helper.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from ft_transport.errors import ConfigurationError
from ft_transport.state.dtensors import is_dtensor

CONFIG_NAME: Final = "adapter_config.json"

_MATRIX: Final = re.compile(
    r"(?:base_model\.model\.)?(?:(?P<module>.+?)\.)??"
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?P<rest>\..+)?"
)
# fmt: off
_PLAIN: Final = frozenset([
    "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "fan_in_fan_out", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "runtime_config", "megatron_config", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size",
])
# fmt: on
"""Fields that do not change what an adapter adds to a model: they choose modules, or affect only training."""
MODULE_FEATURES: Final = frozenset({"modules_outside_layers", "modules_without_q_proj"})
"""Features of the modules' placement; engines apply these unless they declare otherwise."""
_PLACED: Final = re.compile(r"(?:^|\.)(?:layers\.\d+|embed_tokens|lm_head)\.")
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base model's weights unchanged (peft/tuners/lora/layer.py)."""


def module_of(name: str) -> tuple[str, str] | None:
    """Return module and kind of a LoRA matrix, from its name in a file; ``None`` for any other tensor."""
    match = _MATRIX.fullmatch(name)
    return (match["module"] or "", match["kind"]) if match is not None else None


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Return the rank that the configuration gives a module."""
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """Return the factor of ``B @ A`` in a module."""
    return _scale(
        config, rank_of(config, module), _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    )


def is_of_experts(module: str) -> bool:
    """Return whether PEFT applied LoRA to a parameter of all experts of a layer (``target_parameters``)."""
    return module.rpartition(".")[2] in ("experts", "base_layer")


def features_of(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, object]:
    """Return an adapter's features beyond plain LoRA: configuration fields, ``lora_embedding``, `MODULE_FEATURES`.

    Args:
        config: PEFT's fields.
        names: Names of the adapter's tensors.

    Returns:
        The value of each feature; also of unknown fields, because they may change the adapter's effect.
    """
    features = {name: value for name, value in config.items() if value and name not in _PLAIN}
    if features.get("bias") == "none":
        del features["bias"]
    init = str(features.get("init_lora_weights")).lower()
    if init in ("none", "true", *_PLAIN_INITS):
        features.pop("init_lora_weights", None)
    if str(features.get("peft_type", "LORA")).rpartition(".")[2] == "LORA":
        features.pop("peft_type", None)
    modules = {name: module_of(name) or ("", "") for name in names}
    blocks = {module.removesuffix("q_proj") for module, _ in modules.values() if module.endswith("q_proj")}
    for name, (module, kind) in modules.items():
        if kind and not _PLACED.search(f"{module}."):
            features.setdefault("modules_outside_layers", name)
        if module.endswith((".k_proj", ".v_proj")) and module[: -len("k_proj")] not in blocks:
            features.setdefault("modules_without_q_proj", name)
        if not kind:
            features.setdefault("modules_to_save", name)
        elif is_of_experts(module):
            features.setdefault("target_parameters", name)
        elif kind.startswith("lora_embedding"):
            features.setdefault("lora_embedding", name)
        elif kind == "lora_magnitude_vector":
            features.setdefault("use_dora", name)
        elif name.endswith(".bias"):
            features.setdefault("lora_bias", name)
    return features


def features_in(directory: Path) -> dict[str, object]:
    """Return `features_of` the adapter in a version's directory.

    Raises:
        OSError: The directory cannot be read.
    """
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        return features_of(json.loads((directory / CONFIG_NAME).read_bytes()), file.keys())


def plain_adapter(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Return the adapter of the same effect with one rank and one scale, ``lora_alpha / r``.

    For rsLoRA only ``lora_alpha`` changes, and no tensor. Factors that differ by module are folded into ``lora_B``,
    multiplied in float32 and rounded once: exact if the scales differ by powers of two. Smaller ranks are padded with
    zeros. All this depends only on the configuration, so that ranks with different modules agree.

    Args:
        tensors: Tensors by their names in a file.
        config: PEFT's fields.
        dtype: Dtype in which the matrices will be published; ``None`` for their own.

    Raises:
        ConfigurationError: A tensor cannot be converted.
    """
    rank_pattern, alpha_pattern = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not (config.get("use_rslora") or rank_pattern or alpha_pattern):
        return tensors, config
    ranks = {config["r"], *rank_pattern.values()}
    alphas = {config["lora_alpha"], *alpha_pattern.values()}
    rank = max(ranks)
    scale = abs(_scale(config, config["r"], config["lora_alpha"])) or 1.0
    largest = max(abs(_scale(config, *each)) for each in product(ranks, alphas))
    # No factor exceeds 1, which could overflow; modules that no pattern names get a power of two.
    scale *= 2.0 ** max(0, math.ceil(math.log2(largest / scale or 1.0)))
    plain = {}
    for name, tensor in tensors.items():
        module, kind = module_of(name) or ("", "")
        plain[name] = tensor
        if is_of_experts(module) and (rank_pattern or alpha_pattern):
            raise ConfigurationError(
                f"expected one rank and one scale where all experts of a layer share an adapter, got patterns: {name}"
            )
        if kind.endswith("_B"):
            plain[name] = _scaled(tensor, scale_of(config, module) / scale, dtype)
        if kind.endswith(("_A", "_B")) and tensor.ndim > 1:
            plain[name] = _filled_up(name, plain[name], 0 if kind.endswith("_A") else 1, rank)
    alpha = scale * rank
    changed = {"r": rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha}
    return plain, {**config, **changed, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}


def _scale(config: Mapping[str, Any], rank: int, alpha: float) -> float:
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return a module's value, as ``get_pattern_key`` in peft/utils/other.py finds it."""
    return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _scaled(tensor: torch.Tensor, factor: float, dtype: torch.dtype | None) -> torch.Tensor:
    if factor == 1:
        return tensor
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return (tensor.to(wide) * factor).to(dtype if dtype is not None else tensor.dtype)


def _filled_up(name: str, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = rank - shape[dim]
    if not shape[dim]:
        return tensor
    if is_dtensor(tensor):
        raise ConfigurationError(
            f"expected whole tensors where ranks of modules differ (rank_pattern), got a DTensor, {name}; publish "
            "LoRAAdapter({name: tensor.full_tensor() ...}, config)"
        )
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
