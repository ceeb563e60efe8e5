"""Two ranks publish models of ``transformers`` that ``fully_shard`` has divided; started by `ranks`.

Usage: ``published_models.py DIRECTORY SCENARIO...``, as `ranks.report_scenarios` says; the versions are under
``DIRECTORY/SCENARIO``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import report_scenarios
from safetensors.torch import load_file
from tiny_models import TOKENS, load, logits_of, tiny_llama
from torch import nn
from torch.distributed.fsdp import fully_shard

from ft_transport import ConfigurationError, LoRAAdapter, Publisher, PublishError, RankFailedError, WeightFormat


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


def read_by_transformers(root: Path) -> dict[str, Any]:
    """Trained for a step, cast, in several files, beside what rank 0 alone has."""
    model = sharded(tiny_llama(tie_word_embeddings=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    files = {"config.json": model.config.to_dict()} if dist.get_rank() == 0 else {"../refused": b"elsewhere"}
    weight_format = WeightFormat(dtype=torch.bfloat16, max_shard_bytes=6000)
    with Publisher([], root, weight_format=weight_format) as publisher:
        directory = publisher.publish(1, model.state_dict(), files=files).directory
    whole = tiny_llama(tie_word_embeddings=True)
    whole.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    return {
        "names": sorted(path.name for path in directory.iterdir()),
        "equals_the_trainer": torch.equal(logits_of(load(directory, torch.bfloat16)), logits_of(whole.bfloat16())),
        "equals_the_untrained": torch.equal(
            logits_of(load(directory, torch.bfloat16)), logits_of(tiny_llama(tie_word_embeddings=True).bfloat16())
        ),
    }


def refused_on_all_ranks(root: Path) -> dict[str, Any]:
    """What one rank is told, or gives, otherwise than the others, and what only both together can know."""
    rank = dist.get_rank()
    mine = {f"stage.{rank}": torch.full((4,), float(rank))}
    table = {"stage.0": "model.layers.0", "stage.1": "model.layers.1", "stage.2": "model.layers.2"}

    def published(root: Path, weight_format: WeightFormat, files: Any = None) -> str:
        try:
            with Publisher([], root, weight_format=weight_format) as publisher:
                publisher.publish(1, mine, files=files)
        except (ConfigurationError, PublishError, RankFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return " ".join(sorted(path.name for path in root.glob("version-*/*")))

    reports = {
        "dtype": published(root, WeightFormat(dtype=(torch.float16, torch.bfloat16)[rank])),
        "table": published(root, WeightFormat(names={"stage.0": ("a", "b")[rank]})),
        "unknown": published(root, WeightFormat(names=table)),
        "one_name": published(root, WeightFormat(names=lambda _name: "model.layers.0")),
        "files": published(root, WeightFormat(), {"../config.json": b""} if rank == 0 else None),
        "known": published(root, WeightFormat(names={name: table[name] for name in ("stage.0", "stage.1")})),
    }
    dist.barrier()
    found = load_file(root / "version-1" / "model.safetensors")
    return {**reports, "found": {name: tensor.tolist() for name, tensor in found.items()}}


def adapter_of_peft(root: Path) -> dict[str, Any]:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_llama(), config)
    saved = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    sharded(model.base_model.model)
    adapter = LoRAAdapter.of(model, model.peft_config["default"])
    with Publisher([], root, weight_format=WeightFormat(dtype=torch.bfloat16)) as publisher:
        directory = publisher.publish(1, adapter).directory
    found = load_file(directory / "adapter_model.safetensors")
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), directory)
    return {
        "names": sorted(found) == sorted(saved),
        "different": sorted(name for name in found if not torch.equal(found[name], saved[name].bfloat16())),
        "loaded": sorted(peft.get_peft_model_state_dict(loaded)) == sorted(saved),
    }


SCENARIOS = (tied_embeddings, tied_on_one_rank, read_by_transformers, refused_on_all_ranks, adapter_of_peft)

if __name__ == "__main__":
    # The libraries warn of each other's newest names.
    warnings.simplefilter("ignore")
    report_scenarios(SCENARIOS, Path)
