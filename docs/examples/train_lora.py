"""Train a LoRA adapter and publish each version to an inference engine, while the training goes on.

With a vLLM that serves the same base model::

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora
    python train_lora.py --engine http://localhost:8000 --versions /shared/versions

The base model here is a Llama with two layers that is made on the spot, so the script runs without a download. Name a
directory or a model of the Hugging Face hub with ``--base`` to train a real one.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import peft
import torch
import transformers

from ft_transport import LoRAAdapter, Publisher, VLLMEngine

parser = argparse.ArgumentParser()
parser.add_argument("--base", help="directory or name of the base model; default: a tiny one")
parser.add_argument("--engine", action="append", required=True, help="URL of a vLLM; may be repeated")
parser.add_argument("--versions", required=True, help="directory of versions; the engines see it under the same path")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--publish-every", type=int, default=2)
options = parser.parse_args()


def base_model() -> torch.nn.Module:
    """Return the model that is adapted; it stays frozen."""
    if options.base:
        return transformers.AutoModelForCausalLM.from_pretrained(options.base)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))


def main() -> None:
    """Train, and publish every few steps."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base_model(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tokens = torch.randint(0, model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(1))

    engines = [VLLMEngine(url, lora_name="policy") for url in options.engine]
    handle = None
    with Publisher(engines, options.versions, engine_timeout=timedelta(seconds=60)) as publisher:
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % options.publish_every == 0:
                adapter = LoRAAdapter.of(model, model.peft_config["default"])
                handle = publisher.publish(step, adapter)  # returns when it is on disk; training goes on meanwhile
        if handle is not None:
            print(handle.result(), flush=True)  # a line for each engine, with the version that it confirmed


if __name__ == "__main__":
    main()
