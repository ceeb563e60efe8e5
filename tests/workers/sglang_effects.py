"""What SGLang adds to a model for an adapter on disk, computed with its own code.

Usage: ``sglang_effects.py DIRECTORY MODEL INPUTS OUTPUTS``. SGLang's ``LoRAConfig`` reads the directory, its
``LoRAAdapter`` fuses the matrices, its ``lora_ops`` multiply, all from the installed wheel. Its buffers, which stand
between the two, need a model on a GPU: they take ``config.r`` rows of each fused part (sglang/srt/lora/mem_pool.py,
``load_lora_weight_to_buffer``). The model's configuration is in MODEL, its inputs are by the width of layers, and the
outputs by the names of modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

import sglang_on_cpu  # noqa: F401  # what SGLang imports, and no machine without a GPU has
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.torch_ops.lora_ops import sgemm_lora_a_fwd, sgemm_lora_b_fwd
from transformers import AutoConfig

_PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def main() -> None:
    directory, model, inputs, outputs = sys.argv[1:]
    config = LoRAConfig(directory)
    adapter = LoRAAdapter("uid", config, AutoConfig.from_pretrained(model), LoadConfig(), None)
    adapter.initialize_weights_from_tensors(load_file(Path(directory) / "adapter_model.safetensors"))
    by_width = {tensor.shape[1]: tensor for tensor in load_file(inputs).values()}
    effects: dict[str, torch.Tensor] = {}
    for layer in adapter.layers:
        for name, a in layer.weights.items():
            if not name.endswith(".lora_A.weight"):
                continue
            b = layer.weights[name.replace("lora_A", "lora_B")].float()
            block, _, fused = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight").rpartition(".")
            parts = _PARTS.get(fused, [fused])
            assert a.shape[0] == config.r * len(parts), f"{name} has the shape {a.shape}, and SGLang's buffer no other"
            assert b.shape[1] == config.r, f"the part beside {name} has the shape {b.shape}"
            x = by_width[a.shape[1]]
            batch = (torch.tensor([0]), torch.tensor([len(x)]), torch.tensor([config.r]))
            middle = sgemm_lora_a_fwd(x, a.float()[None], *batch, torch.tensor([adapter.scaling]), len(parts))
            ends = torch.arange(len(parts) + 1) * (b.shape[0] // len(parts))
            chunks = sgemm_lora_b_fwd(middle, b[None], *batch, ends).chunk(len(parts), dim=1)
            effects.update({f"{block}.{part}": chunk.contiguous() for part, chunk in zip(parts, chunks, strict=True)})
    save_file(effects, outputs)


if __name__ == "__main__":
    main()
