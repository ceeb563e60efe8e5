"""Moves the states of optimizers of other packages through a quorum of two and a checkpoint.

``make optimizer-zoo`` runs this program in an environment of its own; ``ARGS="bfloat16 kron"`` chooses by parts of
names. It prints a table at the end. The exit status is 1 if a state arrives with other bits, or does not arrive at all,
and the optimizer itself is not at fault.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from optimizer_zoo import Kind, MakeOptimizer, Trained, travels
from programs import fork_writers
from quorum_threads import loopback_transport
from state_equality import exact
from torch.optim import Optimizer

from manager import Manager, RegistryError

_EQUAL = "equal"
_REFUSED = "refused by name at the first boundaries"
_OWN_FAULT = "the optimizer's own fault"
_NOT_HERE = "not comparable, not even within one process"
_WRONG = "WRONG"
_AT_ONCE = 16
"""One manager registers so many optimizers: two replicas take longer to meet than to step."""
_WIDEST = 300

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
_OF_MODELS = ("adalomo", "adammini", "lomo")
"""Their constructors take the model."""


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
            kind = Kind(
                _by_groups(make) if is_of_matrices else make,
                width=width,
                has_vectors=not is_of_matrices,
                takes_model=name in _OF_MODELS,
            )
            yield f"pytorch_optimizer.{name}", kind


def _by_groups(make: MakeOptimizer) -> MakeOptimizer:
    return lambda parameters: make([{"params": list(parameters), "use_muon": True}])


def why_not_here(kind: Kind) -> str:
    """Return why two equal runs within one process cannot be compared; empty if they can."""
    try:
        first, second = Trained(kind, 0), Trained(kind, 0)
        _step(range(4), first, second)
    except Exception as error:
        return _shown(error)
    return "" if exact(first.model.state_dict()) == exact(second.model.state_dict()) else "two equal runs differ"


def refusal(kind: Kind) -> str:
    """Return the error with which a manager refuses the optimizer at its first boundaries; empty if none does."""
    manager = Manager(checkpoint_transport=loopback_transport())
    try:
        trained = Trained(kind, 0)
        manager.register("model", trained.model)
        manager.register("optimizer", trained.optimizer)
        for step in range(3):
            manager.start_step(step)
            _step([step], trained)
    except RegistryError as error:
        return str(error)
    finally:
        manager.shutdown()
    return ""


def own_fault(kind: Kind) -> str:
    """Return why a copy that torch alone makes from the state steps differently; empty if the copy steps alike.

    If torch's own loader rounds the state, the optimizer is not at fault: a manager loads such states exactly.
    """
    saved, loaded = Trained(kind, 0), Trained(kind, 1)
    _step(range(3), saved)
    is_own_loader = type(loaded.optimizer).load_state_dict is not Optimizer.load_state_dict
    try:
        state = deepcopy(saved.optimizer.state_dict())
        loaded.model.load_state_dict(saved.model.state_dict())
        loaded.optimizer.load_state_dict(deepcopy(state))
        if exact(loaded.optimizer.state_dict()) != exact(state):
            return "its load_state_dict makes another state of what it gets" if is_own_loader else ""
        _step(range(3, 6), saved, loaded)
    except Exception as error:
        return f"its state cannot be loaded: {_shown(error)}"
    is_equal = exact(saved.model.state_dict()) == exact(loaded.model.state_dict())
    return "" if is_equal else "it steps differently with the same state_dict: a part of its state is not in there"


def travelled(kinds_by_title: Mapping[str, Kind]) -> Iterator[tuple[str, str]]:
    """Move all of them at once. Yields each title with the fault that was found, or with an empty text."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            wrong: dict[str, str] = {}
            for way, parts in travels(kinds_by_title, Path(directory)):
                wrong = {**dict.fromkeys(parts, f"silently differs: {way}"), **wrong}
        except Exception as error:
            wrong = dict.fromkeys(kinds_by_title, _shown(error))
    if not wrong or len(kinds_by_title) == 1:
        yield from ((title, wrong.get(title, "")) for title in kinds_by_title)
        return
    # An optimizer that fails ends the quorum of the others.
    titles = list(kinds_by_title)
    for half in (titles[: len(titles) // 2], titles[len(titles) // 2 :]):
        yield from travelled({title: kinds_by_title[title] for title in half})


def outcomes(kinds_by_title: Mapping[str, Kind]) -> Iterator[tuple[str, str, str]]:
    """Yield title, result and reason of each."""
    comparable: dict[str, Kind] = {}
    for title, kind in kinds_by_title.items():
        if reason := why_not_here(kind):
            yield title, _NOT_HERE, reason
        elif reason := refusal(kind):
            yield title, _REFUSED, reason
        else:
            comparable[title] = kind
    for title, reason in travelled(comparable) if comparable else ():
        fault = own_fault(comparable[title]) if reason else ""
        yield title, (_OWN_FAULT if fault else _WRONG if reason else _EQUAL), f"{fault} ({reason})" if fault else reason


def _step(seeds: Iterable[int], *trained: Trained) -> None:
    for seed in seeds:
        for each in trained:
            each.backward(seed)
            each.step(seed)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    fork_writers()
    every = {
        f"{name} {str(dtype).removeprefix('torch.')}": replace(kind, dtype=dtype)
        for name, kind in kinds()
        for dtype in (torch.float32, torch.bfloat16)
    }
    chosen = [title for title in every if all(part in title for part in sys.argv[1:])]
    table: dict[str, list[str]] = {result: [] for result in (_EQUAL, _REFUSED, _OWN_FAULT, _NOT_HERE, _WRONG)}
    for start in range(0, len(chosen), _AT_ONCE):
        titles = chosen[start : start + _AT_ONCE]
        with contextlib.redirect_stdout(io.StringIO()):
            found = list(outcomes({title: every[title] for title in titles}))
        for title, result, reason in found:
            table[result].append(f"{title}: {reason[:_WIDEST]}" if reason else title)
        print(f"{start + len(titles)} of {len(chosen)}", flush=True)
    for result, lines in table.items():
        print(f"\n{result}: {len(lines)}", *lines, sep="\n  ")
    sys.exit(bool(table[_WRONG]) or not chosen)


if __name__ == "__main__":
    main()
