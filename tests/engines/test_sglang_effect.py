"""What SGLang's own code makes of published adapters (``sglang_effects.py``), compared with PEFT's own forward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from programs import run
from safetensors.torch import load_file, save_file

from ft_transport import LoRAAdapter, Publisher, WeightFormat

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_EFFECTS = Path(__file__).parents[1] / "workers" / "sglang_effects.py"
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_WIDTHS = (64, 96)


def peft_model(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=_WIDTHS[0],
        intermediate_size=_WIDTHS[1],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=_MODULES, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    return model


@torch.no_grad()
def relative_error(directory: Path, model: Any, scratch: Path) -> float:
    """Of what SGLang adds to the outputs of all modules."""
    x = {str(width): torch.randn(16, width) for width in _WIDTHS}
    save_file(x, scratch / "inputs.safetensors")
    model.config.save_pretrained(scratch)
    ended = run(
        [sys.executable, str(_EFFECTS), directory, scratch, scratch / "inputs.safetensors", scratch / "outputs"],
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    found = load_file(scratch / "outputs")
    wrong, right = [], []
    for name, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            inputs = x[str(layer.in_features)]
            right.append((layer(inputs) - layer.base_layer(inputs)).flatten())
            wrong.append(found[name].flatten() - right[-1])
    assert len(right) == len(found) == len(_MODULES) * 2
    return float(torch.cat(wrong).norm() / torch.cat(right).norm())


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 32, "down_proj": 4}},
        {"rank_pattern": {"o_proj": 4, r"layers\.1\.mlp\.down_proj": 16}},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.self_attn.k_proj": 3}, "use_rslora": True},
    ],
    ids=str,
)
def test_an_adapter_has_the_effect_that_it_has_in_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    model = peft_model(**options)
    adapter = LoRAAdapter.of(model, model.peft_config["default"])
    with Publisher([], tmp_path / "float32") as publisher:
        assert relative_error(publisher.publish(1, adapter).directory, model, tmp_path) < 1e-5
    with Publisher([], tmp_path / "bfloat16", weight_format=WeightFormat(dtype=torch.bfloat16)) as publisher:
        # Each element is rounded once, whether a scale is folded into it or not.
        assert relative_error(publisher.publish(1, adapter).directory, model, tmp_path) < 5e-3


def test_what_peft_itself_saves_has_another_effect(tmp_path: Path) -> None:
    """The reason for all this."""
    model = peft_model(use_rslora=True)
    model.save_pretrained(tmp_path / "saved")
    assert relative_error(tmp_path / "saved", model, tmp_path) > 0.5
