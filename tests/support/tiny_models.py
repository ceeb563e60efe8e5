"""Models of ``transformers`` that are made in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

TOKENS: Final = torch.tensor([[1, 5, 9, 2, 30, 7]])


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


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A version as anybody loads a model."""
    import transformers

    # It has a thread that stays.
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True).eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Of every token."""
    logits: torch.Tensor = model(TOKENS).logits
    return logits
