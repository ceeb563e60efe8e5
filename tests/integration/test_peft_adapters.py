"""Adapters of real PEFT models: what is published is what PEFT itself would save, however the model is wrapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_servers import SGLangStandIn, serving
from safetensors.torch import load_file
from served_memory import until
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ft_transport import (
    ConfigurationError,
    DeltaDirectory,
    LoRAAdapter,
    Publisher,
    PublishError,
    SGLangEngine,
    SkyRLEngine,
    VLLMEngine,
    WeightFormat,
)

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


def test_one_adapter_of_several() -> None:
    model = peft_model()
    model.add_adapter("second", peft.LoraConfig(r=3, lora_alpha=4, target_modules=["q_proj"]))
    adapter = LoRAAdapter.of(model, model.peft_config["second"], "second")
    assert_same(adapter, model, "second")
    with pytest.raises(ConfigurationError, match=r"'another'.*found none in PeftModel"):
        LoRAAdapter.of(model, model.peft_config["second"], "another")


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


def published(root: Path, adapter: LoRAAdapter, **weight_format: Any) -> Path:
    with Publisher([], root, weight_format=WeightFormat(**weight_format)) as publisher:
        return publisher.publish(1, adapter).directory


@torch.no_grad()
def relative_error(directory: Path, model: Any) -> float:
    """Of what an engine adds to outputs that knows nothing but ``lora_alpha / r``, beside PEFT's own forward."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    wrong, right = [], []
    for name, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            a, b = (tensors[f"base_model.model.{name}.lora_{kind}.weight"].float() for kind in "AB")
            assert a.shape[0] == b.shape[1] == config["r"]
            x = torch.randn(8, layer.in_features)
            right.append((layer(x) - layer.base_layer(x)).flatten())
            wrong.append((x @ a.T @ b.T * (config["lora_alpha"] / config["r"])).flatten() - right[-1])
    return float(torch.cat(wrong).norm() / torch.cat(right).norm())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 24}},
        {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 8, "v_proj": 1}},
        {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"0.self_attn.v_proj": 1.5}, "use_rslora": True},
    ],
    ids=str,
)
def test_a_plain_engine_applies_what_the_trainer_applies(tmp_path: Path, options: dict[str, Any]) -> None:
    model = peft_model(**options)
    adapter = LoRAAdapter.of(model, model.peft_config["default"])
    assert relative_error(published(tmp_path / "float32", adapter), model) < 1e-6
    # Each element is rounded once, whether a scale is folded into it or not.
    assert relative_error(published(tmp_path / "bfloat16", adapter, dtype=torch.bfloat16), model) < 5e-3


def test_only_what_differs_by_module_changes_tensors_and_powers_of_two_are_exact(tmp_path: Path) -> None:
    for options, factors in (
        ({"use_rslora": True}, {"q_proj": 1.0, "v_proj": 1.0}),
        # As no factor is above 1, none overflows.
        ({"alpha_pattern": {"q_proj": 16}}, {"q_proj": 1.0, "v_proj": 0.25}),
    ):
        model = peft_model(**options)
        adapter = LoRAAdapter.of(model, model.peft_config["default"])
        found = load_file(published(tmp_path / str(options), adapter) / "adapter_model.safetensors")
        for name, tensor in adapter.tensors.items():
            factor = next(value for module, value in factors.items() if module in name) if "lora_B" in name else 1
            assert torch.equal(found[name], tensor * factor), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_dora": True}, "does not apply use_dora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'.*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"lora_bias": True, "target_modules": ["biased"]}, "lora_bias=True"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication="),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\]"),
    ],
    ids=str,
)
def test_what_an_engine_does_not_apply_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    base = tiny_llama()
    base.model.layers[0].mlp.biased = nn.Linear(16, 16)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **options})
    model = peft.get_peft_model(base, config)
    adapters = [LoRAAdapter.of(model, config)]
    if "init_lora_weights" in options:  # What a dict of the user's own does not say, the model does.
        adapters.append(LoRAAdapter.of(model, {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}))
    for engine in (SGLangEngine, VLLMEngine, SkyRLEngine):
        with Publisher([engine("http://127.0.0.1:1")], tmp_path) as publisher:
            for adapter in adapters:
                with pytest.raises(PublishError, match=f"127.0.0.1:1 applies; {engine.__name__} .*{expected}"):
                    publisher.publish(1, adapter)
            assert publisher.latest() is None


def test_modules_that_sglang_drops_or_cannot_place_are_refused_by_name(tmp_path: Path) -> None:
    def adapter(module: str) -> LoRAAdapter:
        tensors = {f"base_model.model.{module}.lora_A.weight": torch.ones(2, 4)}
        return LoRAAdapter(tensors, {"r": 2, "lora_alpha": 4, "target_modules": [module.rpartition(".")[2]]})

    with Publisher([SGLangEngine("http://127.0.0.1:1")], tmp_path) as publisher:
        for module, feature in {
            "projector.linear": "modules_outside_layers",
            "model.layers.0.self_attn.v_proj": "modules_without_q_proj",
        }.items():
            with pytest.raises(PublishError, match=f"does not apply {feature}='.*{module}"):
                publisher.publish(1, adapter(module))
    with Publisher([VLLMEngine("http://127.0.0.1:1")], tmp_path, engine_timeout=timedelta(seconds=1)) as publisher:
        publisher.publish(1, adapter("model.layers.0.self_attn.v_proj"))
        publisher.close(timedelta(0))


def test_weights_that_the_initialisation_changed_may_be_those_that_engines_serve(tmp_path: Path) -> None:
    server = SGLangStandIn()
    model = peft_model(init_lora_weights="pissa")
    said = {**model.peft_config["default"].to_dict(), "init_lora_weights": True}
    with serving(server), Publisher([SGLangEngine(server.url)], tmp_path) as publisher:
        publisher.publish(1, LoRAAdapter.of(model, said)).result(timedelta(seconds=20))


def test_all_experts_in_one_parameter_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    chosen = peft.LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(transformers.MixtralForCausalLM(config), chosen)
    adapter = LoRAAdapter.of(model, chosen)
    bare = LoRAAdapter(adapter.tensors, {"r": 2, "lora_alpha": 4, "target_modules": ["experts"]})
    with Publisher([SGLangEngine("http://127.0.0.1:1")], tmp_path) as publisher:
        for each in (adapter, bare):
            with pytest.raises(PublishError, match="does not apply target_parameters="):
                publisher.publish(1, each)


def test_an_engine_that_came_later_is_not_told_of_what_it_does_not_apply(tmp_path: Path) -> None:
    server = SGLangStandIn()
    model = peft_model(use_dora=True)
    adapter = LoRAAdapter.of(model, model.peft_config["default"])
    with serving(server), Publisher([DeltaDirectory(tmp_path / "d")], tmp_path / "v") as publisher:
        publisher.publish(1, adapter).result(timedelta(seconds=20))
        publisher.add_engine(SGLangEngine(server.url))
        until(lambda: publisher.engines()[-1].outcome == "refused")
        assert "does not apply use_dora=True" in publisher.engines()[-1].error
        assert "POST /load_lora_adapter" not in server.routes
        with pytest.raises(PublishError, match="does not apply use_dora=True"):
            publisher.publish(2, adapter)
        publisher.remove_engine(server.url)
        publisher.publish(2, adapter).result(timedelta(seconds=20))


def test_an_engine_of_the_users_own_says_what_it_applies(tmp_path: Path) -> None:
    class Own(SGLangEngine):
        adapter_features = frozenset({"use_dora"})

    server = SGLangStandIn()
    model = peft_model(use_dora=True)
    with serving(server), Publisher([Own(server.url)], tmp_path) as publisher:
        publisher.publish(1, LoRAAdapter.of(model, model.peft_config["default"])).result(timedelta(seconds=20))


def test_what_is_beside_plain_lora_in_an_unknown_field_is_refused(tmp_path: Path) -> None:
    model = peft_model()
    config = {**model.peft_config["default"].to_dict(), "use_something_new": True}
    with (
        Publisher([VLLMEngine("http://127.0.0.1:1")], tmp_path) as publisher,
        pytest.raises(PublishError, match="does not apply use_something_new=True"),
    ):
        publisher.publish(1, LoRAAdapter.of(model, config))


def test_two_adapters_that_are_active_at_once_are_refused_by_name() -> None:
    model = peft_model()
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=4, target_modules=["k_proj"]))
    assert_same(LoRAAdapter.of(model, model.peft_config["default"]), model)
    model.base_model.set_adapter(["default", "second"])
    for name in ("default", "second"):
        with pytest.raises(ConfigurationError, match=r"one active adapter, got default, second in model\.layers\.0"):
            LoRAAdapter.of(model, model.peft_config[name], name)
    model.add_weighted_adapter(["default", "second"], [1.0, 1.0], "both", combination_type="cat")
    model.set_adapter("both")
    LoRAAdapter.of(model, model.peft_config["both"], "both")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"r": 3}, r"rank 3 for .*q_proj\.lora_A\.weight according to .*, got a tensor of shape \(2, 16\)"),
        ({"lora_alpha": 8}, r"scale 4 for .*q_proj according to the configuration, got a layer with scale 2"),
        ({"use_rslora": True}, r"scale 2\.8\d* for .* according to the configuration"),
        ({"rank_pattern": {"v_proj": 0}}, "ranks of at least 1 in rank_pattern"),
    ],
    ids=str,
)
def test_the_configuration_of_another_adapter_is_refused(options: dict[str, Any], expected: str) -> None:
    model = peft_model()
    other = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **options})
    with pytest.raises(ConfigurationError, match=expected):
        LoRAAdapter.of(model, other)


def test_a_peft_model_published_as_a_model_is_refused_by_name(tmp_path: Path) -> None:
    def names(name: str) -> str | None:
        return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")

    model = peft_model()
    injected = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), tiny_llama())
    for each in (model, injected):
        state = each.state_dict()
        with (
            Publisher([], tmp_path / "refused") as publisher,
            pytest.raises(PublishError, match=r"those of a PEFT model.*merge_and_unload"),
        ):
            publisher.publish(1, state)
        with Publisher([], tmp_path / type(each).__name__, weight_format=WeightFormat(names=names)) as publisher:
            publisher.publish(1, state)
