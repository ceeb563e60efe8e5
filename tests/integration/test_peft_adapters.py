"""Adapters of real PEFT models: what is published is what PEFT itself would save, however the model is wrapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ft_transport import ConfigurationError, LoRAAdapter

peft: Any = None
transformers: Any = None

# The two libraries warn of each other's newest names.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    """Imports what takes seconds where it is used, and not in each process that collects tests."""
    globals().update({name: pytest.importorskip(name) for name in ("peft", "transformers")})


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def peft_model(**options: Any) -> Any:
    chosen = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **options}
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**chosen))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    return model


def assert_same(adapter: LoRAAdapter, model: Any, name: str = "default") -> None:
    saved = peft.get_peft_model_state_dict(model, adapter_name=name)
    assert sorted(adapter.tensors) == sorted(saved)
    for key, tensor in saved.items():
        assert torch.equal(adapter.tensors[key], tensor), key


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def wrap_layers(model: Any) -> Any:
    layers = model.base_model.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    return model


def compile_layers(model: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        layer.self_attn = compiled(layer.self_attn)
    return model


class _DataParallel(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel without a process group: only its name for what it wraps counts here."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda model: model, id="not wrapped"),
        pytest.param(compiled, id="compiled"),
        pytest.param(compile_layers, id="parts compiled"),
        pytest.param(wrap_layers, id="activation checkpointing"),
        pytest.param(_DataParallel, id="data parallel"),
        pytest.param(lambda model: compiled(_DataParallel(wrap_layers(model))), id="all of them"),
    ],
)
def test_a_wrapped_model_gives_the_names_that_peft_saves(wrap: Callable[[Any], Any]) -> None:
    model = peft_model()
    expected = {key: tensor.clone() for key, tensor in peft.get_peft_model_state_dict(model).items()}
    adapter = LoRAAdapter.of(wrap(model), model.peft_config["default"].to_dict())
    assert sorted(adapter.tensors) == sorted(expected)
    assert all(torch.equal(adapter.tensors[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"]}], ids=str)
def test_kinds_of_lora(options: dict[str, Any]) -> None:
    model = peft_model(**options)
    adapter = LoRAAdapter.of(model, model.peft_config["default"])
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert sorted(adapter.tensors) == sorted(saved)


def test_the_configuration_of_peft_itself_is_taken() -> None:
    model = peft_model()
    adapter = LoRAAdapter.of(model, model.peft_config["default"])
    assert_same(adapter, model)
    assert json.loads(adapter.encoded_config())["target_modules"] == ["q_proj", "v_proj"]


def test_one_adapter_of_several() -> None:
    model = peft_model()
    model.add_adapter("second", peft.LoraConfig(r=3, lora_alpha=4, target_modules=["q_proj"]))
    adapter = LoRAAdapter.of(model, model.peft_config["second"], "second")
    assert_same(adapter, model, "second")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"bias": "lora_only", "target_modules": ["biased"]}, "biased.base_layer.bias"),
        ({"bias": "all", "target_modules": ["q_proj"]}, "biased.bias"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.modules_to_save.default.weight"),
        ({"trainable_token_indices": [1, 2]}, "embed_tokens"),
    ],
    ids=["biases of its layers", "all biases", "whole modules", "tokens"],
)
def test_what_engines_would_not_apply_is_refused_by_name(options: dict[str, Any], path: str) -> None:
    base = tiny_llama()
    base.model.layers[0].mlp.biased = nn.Linear(16, 16)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **options})
    model = peft.get_peft_model(base, config)
    with pytest.raises(ConfigurationError, match=path):
        LoRAAdapter.of(model, config)


def test_adalora_is_refused_by_name() -> None:
    config = peft.AdaLoraConfig(init_r=2, target_r=2, lora_alpha=4, target_modules=["q_proj"], total_step=10)
    model = peft.get_peft_model(tiny_llama(), config)
    with pytest.raises(ConfigurationError, match="lora_E"):
        LoRAAdapter.of(model, config)


def test_a_trained_head_beside_the_adapter_is_refused_by_name() -> None:
    model = peft_model()
    whole = nn.ModuleDict({"policy": model, "value": nn.Linear(16, 1)})
    with pytest.raises(ConfigurationError, match=r"value\.weight"):
        LoRAAdapter.of(whole, model.peft_config["default"])
    assert_same(LoRAAdapter.of(whole["policy"], model.peft_config["default"]), model)
