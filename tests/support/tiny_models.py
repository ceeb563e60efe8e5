"""Models of ``transformers`` that are made in milliseconds."""

from __future__ import annotations

from typing import Any

import torch


def tiny_llama(**options: Any) -> Any:
    """A Llama with two layers; the same on every rank."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            **options,
        }
    )
    return transformers.LlamaForCausalLM(config).eval()
