"""LoRA adapters in the layout that PEFT saves and engines load: ``adapter_model.safetensors``, ``adapter_config.json``.

Layout: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensor names begin with ``base_model.model.`` and
do not contain the name of the adapter (peft/utils/save_and_load.py, ``get_peft_model_state_dict``).

A plain adapter adds ``lora_alpha / r * B @ A`` to weights of the unmodified base model, with the same rank ``r`` for
all modules. Every engine applies plain adapters. Engines ignore many other fields of the configuration: SGLang 0.5.23
reads only ``use_dora`` in addition (sglang/srt/lora/lora.py, ``scaling``), and vLLM 0.23, which SkyRL 0.3.0 pins,
ignores ``rank_pattern`` and ``alpha_pattern`` (vllm/lora/peft_helper.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import nn

from ft_transport.errors import ConfigurationError, PublishError
from ft_transport.state.placements import is_dtensor

_REQUIRED: Final = ("r", "lora_alpha", "target_modules")
_PREFIX: Final = "base_model.model."
_KIND: Final = re.compile(r"(?:^|\.)(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)\.")
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
"""Fields of PEFT's configuration that do not change what an adapter adds to a model."""
MODULE_FEATURES: Final = frozenset({"modules_outside_layers", "modules_without_q_proj"})
"""Features that tell which modules an adapter changes. Engines apply them unless ``adapter_gaps`` lists them."""
_PLACED: Final = re.compile(r"(?:^|\.)(?:layers\.\d+|embed_tokens|lm_head)\.")
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base model's weights unchanged (peft/tuners/lora/layer.py)."""
T = TypeVar("T")
_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes in which ``torch.compile``, activation checkpointing and FSDP1 store the wrapped module. They are part of
the trainer's tensor names, but not of the engines'."""


class PEFTConfig(Protocol):
    """PEFT's ``LoraConfig``."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the configuration by name."""


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """A LoRA adapter to publish. ``Publisher.publish`` copies the tensors, so the trainer may change them afterwards.

    Attributes:
        tensors: Whole tensors or DTensors, by the names that PEFT uses in ``adapter_model.safetensors``.
        config: PEFT's ``LoraConfig`` as a dict. The fields ``r``, ``lora_alpha`` and ``target_modules`` are required.

    Raises:
        ConfigurationError: A field is missing, or a tensor has another rank than the configuration.
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
                f"expected {', '.join(_REQUIRED)} in the adapter's configuration, because engines refuse an adapter "
                f"without them; missing: {', '.join(missing)}"
            )
        tensors: object = self.tensors
        if not isinstance(tensors, Mapping) or not tensors:
            what = "an empty one" if isinstance(tensors, Mapping) else type(tensors).__name__
            raise ConfigurationError(f"expected a mapping from names to an adapter's tensors, got {what}")
        for name in ("r", *(["rank_pattern"] if config.get("rank_pattern") else [])):
            given = config[name].values() if name == "rank_pattern" else [config[name]]
            if any(not isinstance(rank, int) or rank < 1 for rank in given):
                raise ConfigurationError(f"expected ranks of at least 1 in {name}, got {config[name]!r}")
        for name, tensor in tensors.items():
            self._check_rank(name, tensor)

    @classmethod
    def of(cls, module: nn.Module, config: Mapping[str, Any] | PEFTConfig, name: str = "default") -> LoRAAdapter:
        """Return the adapter of a model that was wrapped by PEFT, or by a library that uses the same parameter names.

        The model may be wrapped by ``torch.compile``, activation checkpointing, FSDP or DistributedDataParallel.

        Args:
            module: A module with parameters such as ``layer.lora_A.default.weight``. Parameters outside the adapter
                must not require gradients, because engines would serve the base model's values of these parameters.
            config: PEFT's ``LoraConfig``, or its fields as a dict.
            name: Name of the adapter in PEFT's model.

        Raises:
            ConfigurationError: The module has no parameters of the adapter, trains other parameters, has several active
                adapters, or has other ranks or scales than the configuration.
        """
        fields = config if isinstance(config, Mapping) else config.to_dict()
        # The model's own configuration fills in fields that the caller's dict lacks, such as init_lora_weights.
        known: Any = next((part.peft_config for part in module.modules() if hasattr(part, "peft_config")), {})
        fields = {**(known[name].to_dict() if name in known else {}), **fields}
        tensors = {}
        model = _innermost(module)
        for wrapped_name, parameter in model.named_parameters():
            parameter_name = _without_wrappers(wrapped_name)
            match = _KIND.search(parameter_name)
            if match is None:
                if parameter.requires_grad:
                    raise ConfigurationError(
                        f"expected only LoRA's matrices to be trained, but {parameter_name} is trained as well, and no "
                        "engine takes it from an adapter; freeze it, pass the part of the model that engines serve, or "
                        "publish all weights"
                    )
                continue
            rest = parameter_name[match.end() :].split(".")
            # Skips parameters of other adapters. If the names contain no adapter name, the module has one adapter.
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
        for layer_name, layer in model.named_modules():
            adapter._check_layer(_without_wrappers(layer_name).removeprefix(_PREFIX), layer, name)
        return adapter

    def plain(self, dtype: torch.dtype | None) -> LoRAAdapter:
        """Convert the adapter to a plain one with the same effect: all modules have the same rank and scale.

        With rsLoRA alone, only ``lora_alpha`` changes. If scales differ between modules, the method multiplies each
        ``lora_B`` by the ratio of its old and new scale, in float32 with one rounding. This is exact for powers of
        two. The method pads matrices of smaller rank with zeros. The new rank and scale depend only on the
        configuration, so processes with different modules agree.

        Args:
            dtype: Dtype in which the matrices will be published. With ``None``, each matrix keeps its dtype.

        Raises:
            ConfigurationError: A tensor cannot be converted.
        """
        config = self.config
        rank_pattern, alpha_pattern = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        if not (config.get("use_rslora") or rank_pattern or alpha_pattern):
            return self
        ranks = {config["r"], *rank_pattern.values()}
        alphas = {config["lora_alpha"], *alpha_pattern.values()}
        rank = max(ranks)
        scale = abs(_scale(config, config["r"], config["lora_alpha"])) or 1.0
        largest = max(abs(_scale(config, *each)) for each in product(ranks, alphas))
        # No factor exceeds 1, because a larger one could overflow. Modules without a pattern get a power of two.
        scale *= 2.0 ** max(0, math.ceil(math.log2(largest / scale or 1.0)))
        plain = {}
        for name, own in self.tensors.items():
            tensor = own
            module, kind = module_of(name) or ("", "")
            if is_of_experts(module) and (rank_pattern or alpha_pattern):
                raise ConfigurationError(
                    "expected no rank_pattern and no alpha_pattern, because all experts of a layer share the matrix "
                    f"{name}"
                )
            if kind.endswith("_B"):
                tensor = _scaled(tensor, scale_of(config, module) / scale, dtype)
            if kind.endswith(("_A", "_B")) and tensor.ndim > 1:
                tensor = _filled_up(name, tensor, 0 if kind.endswith("_A") else 1, rank)
            plain[name] = tensor
        alpha = scale * rank
        changed = {"r": rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha}
        return LoRAAdapter(plain, {**config, **changed, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}})

    def encoded_config(self) -> bytes:
        """Return the content of ``adapter_config.json``.

        Raises:
            ConfigurationError: JSON cannot represent a value.
        """
        config = {"peft_type": "LORA", **self.config}
        try:
            text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"expected an adapter's configuration that JSON can represent: {error}") from error
        return text.encode()

    def _check_rank(self, name: object, tensor: torch.Tensor) -> None:
        module, kind = (module_of(name) if isinstance(name, str) else None) or ("", "")
        dim = {"A": 0, "B": 1}.get(kind[-1:])
        if dim is None or is_of_experts(module) or (dim == 1 and tensor.ndim == 1):
            return
        rank = rank_of(self.config, module)
        if tensor.ndim < 2 or tensor.shape[dim] != rank:
            raise ConfigurationError(
                f"expected rank {rank} for {name} according to the configuration, got a tensor of shape "
                f"{tuple(tensor.shape)}; pass the configuration of this adapter, model.peft_config[name]"
            )

    def _check_layer(self, module: str, layer: nn.Module, name: str) -> None:
        """Check that this adapter is the only active one in a PEFT layer, with the scale of the configuration."""
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, Mapping) or name not in scaling:
            return
        active = getattr(layer, "active_adapters", ())
        if name in active and len(active) > 1:
            raise ConfigurationError(
                f"expected one active adapter, got {', '.join(active)} in {module}: the model applies all of them, but "
                "an engine applies only the published one; combine them into one (PEFT's add_weighted_adapter with "
                f'combination_type="cat"), or activate only {name!r}'
            )
        expected = scale_of(self.config, module)
        # With target_parameters, patterns name the experts' parameters, so the layer's scale cannot be looked up.
        if not self.config.get("target_parameters") and not math.isclose(scaling[name], expected, rel_tol=1e-6):
            raise ConfigurationError(
                f"expected scale {expected:g} for {module} according to the configuration, got a layer with scale "
                f"{scaling[name]:g}; pass the configuration of this adapter, model.peft_config[{name!r}]"
            )


def is_adapter(names: Iterable[object]) -> bool:
    """Return whether all names are names of LoRA matrices."""
    return all(isinstance(name, str) and module_of(name) is not None for name in names)


def unwrapped(tensors: Mapping[Any, T]) -> Mapping[Any, T]:
    """Remove the attributes of wrappers, such as ``_orig_mod``, from the names of tensors.

    Raises:
        PublishError: Two tensors have the same name without the wrappers.
    """
    renamed: dict[Any, T] = {}
    for name, tensor in tensors.items():
        plain = _without_wrappers(name) if isinstance(name, str) else name
        if plain in renamed:
            raise PublishError(f"expected one tensor with the name {plain}, got two", path=name)
        renamed[plain] = tensor
    return renamed


def _plain(value: object) -> object:
    """Convert a value of PEFT's configuration that JSON cannot represent: a set of module names, or an enum."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "value"):
        return value.value
    raise TypeError(f"{type(value).__name__} {value!r}")


def module_of(name: str) -> tuple[str, str] | None:
    """Split the name of a LoRA matrix into module and kind, such as ``lora_A``. Return ``None`` for any other name."""
    match = _MATRIX.fullmatch(name)
    return (match["module"] or "", match["kind"]) if match is not None else None


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Return the LoRA rank of a module according to the configuration."""
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """Return the factor by which ``B @ A`` is multiplied in a module."""
    return _scale(
        config, rank_of(config, module), _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    )


def is_of_experts(module: str) -> bool:
    """Return whether one pair of LoRA matrices changes all experts of a layer (``target_parameters``)."""
    return module.rpartition(".")[2] in ("experts", "base_layer")


def features_of(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, object]:
    """Return the features of an adapter that an engine may lack: everything beyond plain LoRA.

    Args:
        config: Fields of PEFT's configuration.
        names: Names of the adapter's tensors.

    Returns:
        The value of each feature, by name. A feature is a field of the configuration, ``lora_embedding``, or one of
        `MODULE_FEATURES`. Unknown fields count as features, because they may change the effect of the adapter.
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
    """Read the adapter in a version's directory, and return its features beyond plain LoRA.

    Raises:
        OSError: The directory cannot be read.
    """
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        return features_of(json.loads((directory / CONFIG_NAME).read_bytes()), file.keys())


def _scale(config: Mapping[str, Any], rank: int, alpha: float) -> float:
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module (as in peft/utils/other.py), or the default."""
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
            f"expected whole tensors, because ranks differ between modules (rank_pattern), got a DTensor, {name}; "
            "publish LoRAAdapter({name: tensor.full_tensor() ...}, config)"
        )
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _innermost(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module
