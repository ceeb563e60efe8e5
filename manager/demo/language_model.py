"""A small language model on the English text that ships inside CPython, one character at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Final, cast

import torch
from torch import nn
from torch.nn import functional

CONTEXT: Final = 96
BATCH: Final = 8


@dataclass(frozen=True, slots=True)
class Text:
    """The corpus as token ids, ``int64 [num_tokens]``, and how many distinct tokens there are."""

    tokens: torch.Tensor
    vocabulary: int

    @classmethod
    def from_python_documentation(cls) -> Text:
        """Return the help topics of the running Python: half a megabyte of English."""
        text = "\n".join(topics[name] for name in sorted(topics))
        alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
        return cls(torch.tensor([alphabet[character] for character in text]), len(alphabet))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's batch, the same in every process: inputs and targets, each ``int64 [BATCH, CONTEXT]``."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([self.tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


class LanguageModel(nn.Module):
    """A transformer decoder with dropout, so that the random generator's state matters too.

    Args:
        vocabulary: Number of distinct tokens.
        width: Size of the hidden state; a multiple of 64.
        num_layers: Transformer layers.
    """

    def __init__(self, vocabulary: int, *, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Tied weights, as in most language models; a recovered replica must have them too.
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats per character; a scalar."""
        hidden = self.tokens(inputs) + self.positions.weight
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        logits = cast(torch.Tensor, self.head(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
