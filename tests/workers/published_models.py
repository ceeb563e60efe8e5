"""Two ranks publish models of ``transformers`` that ``fully_shard`` has divided; started by `ranks`.

Usage: ``published_models.py DIRECTORY SCENARIO...``: each rank leaves what it saw in ``DIRECTORY/RANK.json``, and the
versions are under ``DIRECTORY/SCENARIO``.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_models import tiny_llama
from torch import nn
from torch.distributed.fsdp import fully_shard

from ft_transport import Publisher


def sharded(model: Any) -> Any:
    """As trainers divide a model: each layer, and then the whole."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tied_embeddings(root: Path) -> dict[str, Any]:
    model = tiny_llama(tie_word_embeddings=True)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = sharded(model).state_dict()
    with Publisher([], root) as publisher:
        directory = publisher.publish(1, state).directory
    found = load_file(directory / "model.safetensors")
    return {
        "is_tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "missing": sorted(whole.keys() - found.keys()),
        "different": sorted(name for name in found if not torch.equal(found[name], whole[name])),
    }


def tied_on_one_rank(root: Path) -> dict[str, Any]:
    """Whole tensors and DTensors in one memory, and memory that only one rank shares."""
    layer = fully_shard(nn.Linear(6, 4, bias=False))
    divided = layer.state_dict()["weight"]
    shared = torch.arange(12.0)
    own = shared.clone() if dist.get_rank() else shared
    weights = {"divided": divided, "again": divided.detach(), "whole": shared, "part": own[:4], "own": own}
    expected = {
        "divided": divided.full_tensor(),
        "again": divided.full_tensor(),
        **{name: weights[name] for name in ("whole", "part", "own")},
    }
    with Publisher([], root) as publisher:
        directory = publisher.publish(1, weights).directory
    found = load_file(directory / "model.safetensors")
    return {
        "missing": sorted(expected.keys() - found.keys()),
        "different": sorted(name for name in found if not torch.equal(found[name], expected[name])),
    }


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function for function in (tied_embeddings, tied_on_one_rank)
}


def main() -> None:
    # The libraries warn of each other's newest names.
    warnings.simplefilter("ignore")
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report = {name: SCENARIOS[name](directory / name) for name in sys.argv[2:]}
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
