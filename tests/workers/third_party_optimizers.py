"""Moves the states of optimizers of other packages from replica to replica, and says which do not come through.

``make optimizer-zoo`` runs it, in an environment of its own. ``ARGS="bfloat16 Kron"`` chooses by parts of names.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from optimizer_zoo import Kind, MakeOptimizer, Trained, travels
from programs import fork_writers
from state_equality import exact

from ft_transport import UnsupportedLeafError

_CLASSES = {
    "bitsandbytes.optim": ("Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW8bit", "AdEMAMix8bit", "SGD8bit"),
    "torchao.optim": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeReference"),
    "transformers": ("Adafactor",),
    "lion_pytorch": ("Lion",),
    "prodigyopt": ("Prodigy",),
    "optimi": ("AdamW", "StableAdamW", "Lion", "Ranger"),
    "came_pytorch": ("CAME",),
}
_WIDTH = 64
"""The two matrices have 128 * 64 elements: packages keep the states of smaller ones in float32."""
_KEYWORDS: dict[str, dict[str, Any]] = {
    "SGDScheduleFree": {"lr": 0.01},
    "SGD8bit": {"lr": 0.01, "momentum": 0.9},
    "StableAdamW": {"lr": 0.01},
    "Ranger": {"lr": 0.01},
    "CAME": {"lr": 0.01},
    "bsam": {"num_data": 10},
    "ranger21": {"num_iterations": 100},
}
_OF_MATRICES = ("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon", "spectralsphere")
"""They take groups that say so."""


def kinds() -> Iterator[tuple[str, Kind]]:
    """Yield those of the packages that are installed, in float32."""
    for module, names in _CLASSES.items():
        try:
            package = importlib.import_module(module)
        except ImportError as error:
            print(f"{module} is left out: {error}")
            continue
        for name in names:
            keywords = _KEYWORDS.get(name, {"lr": 0.01} if module == "optimi" else {})
            yield f"{module}.{name}", Kind(partial(getattr(package, name), **keywords), width=_WIDTH)
    with contextlib.suppress(ImportError):
        package = importlib.import_module("pytorch_optimizer")
        for name in package.get_supported_optimizers():
            make = partial(package.load_optimizer(name), **_KEYWORDS.get(name, {}))
            is_of_matrices = name in _OF_MATRICES
            # A step of Kron over the wide matrices takes seconds.
            width = 8 if name == "kron" else _WIDTH
            kind = Kind(_by_groups(make) if is_of_matrices else make, width=width, has_vectors=not is_of_matrices)
            yield f"pytorch_optimizer.{name}", kind


def _by_groups(make: MakeOptimizer) -> MakeOptimizer:
    return lambda parameters: make([{"params": list(parameters), "use_muon": True}])


def why_not_here(kind: Kind) -> str:
    """Return why it could not be compared, even within one process; empty if it can."""
    try:
        first, second = Trained(kind, 0), Trained(kind, 0)
        for seed in range(4):
            first.step(seed)
            second.step(seed)
        models = [exact(each.model.state_dict()) for each in (first, second)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if models[0] == models[1] else "two equal runs differ"


def outcome(kind: Kind) -> tuple[str, str]:
    reason = why_not_here(kind)
    if reason:
        return "not here", reason
    with tempfile.TemporaryDirectory() as directory:
        try:
            differing = [way for way, parts in travels({"optimizer": kind}, Path(directory)) if parts]
        except UnsupportedLeafError as error:
            return "refused", str(error)
        except Exception as error:
            return "FAILED", f"{type(error).__name__}: {error}"
    return ("FAILED", f"differs: {differing}") if differing else ("equal", "")


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fork_writers()
    chosen = sys.argv[1:]
    counts: dict[str, int] = {}
    for name, kind in kinds():
        for dtype in (torch.float32, torch.bfloat16):
            title = f"{name} {str(dtype).removeprefix('torch.')}"
            if not all(part in title for part in chosen):
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                result, reason = outcome(replace(kind, dtype=dtype))
            counts[result] = counts.get(result, 0) + 1
            print(f"{result:9} {title}  {reason[:300]}", flush=True)
    print(counts)
    sys.exit(bool(counts.get("FAILED")) or not counts)


if __name__ == "__main__":
    main()
