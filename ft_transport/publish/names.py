"""The trainer's names of its tensors, and the inference engines' names of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from torch import nn

from ft_transport.errors import PublishError
from ft_transport.publish.weight_format import Names

T = TypeVar("T")
Renamed: TypeAlias = dict[str, str | None]
"""The engine's name of each of the trainer's tensors, ``None`` for a tensor that is left out."""

_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes under which ``torch.compile``, activation checkpointing and FSDP1 hold the wrapped module: no engine knows
these names."""
_MAX_SHOWN: Final = 5


def parameters_by_name(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module, by their names without the wrappers of the module and its parts."""
    for name, parameter in _innermost(module).named_parameters():
        yield _without_wrappers(name), parameter


def modules_by_name(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a module, named as `parameters_by_name` names parameters."""
    for name, part in _innermost(module).named_modules():
        yield _without_wrappers(name), part


def unwrapped(tensors: Mapping[Any, T]) -> Mapping[Any, T]:
    """Return the same tensors by their names without the wrappers of their modules.

    Raises:
        PublishError: Two tensors then have the same name.
    """
    renamed: dict[Any, T] = {}
    for name, tensor in tensors.items():
        plain = _without_wrappers(name) if isinstance(name, str) else name
        if plain in renamed:
            raise PublishError(f"expected one tensor for the engine's name {plain}, got another one", path=name)
        renamed[plain] = tensor
    return renamed


def engine_names(trained: Sequence[str], names: Names) -> Renamed:
    """Return the engine's name of each tensor of this rank.

    Args:
        trained: The trainer's names.
        names: See `WeightFormat`.

    Raises:
        PublishError: Two tensors get one name, or a function returns no name.
    """
    renamed: Renamed = {}
    for name in trained:
        new: object = names.get(name, name) if isinstance(names, Mapping) else names(name)
        if new is not None and (not isinstance(new, str) or not new):
            raise PublishError(f"expected a name, or None to leave the tensor out, got {new!r}", path=name)
        renamed[name] = new
    _check_distinct(renamed)
    return renamed


def check_engine_names(by_rank: Sequence[Renamed], names: Names) -> None:
    """Refuse names that fit no version as a whole: ranks may hold different tensors.

    Args:
        by_rank: The results of `engine_names`, by rank.
        names: See `WeightFormat`.

    Raises:
        PublishError: Ranks name a tensor differently, two tensors get one name, or the table names a tensor that no
            rank has.
    """
    merged: Renamed = {}
    for rank, renamed in enumerate(by_rank):
        for name, new in renamed.items():
            if merged.setdefault(name, new) != new:
                raise PublishError(
                    f"expected one name on all ranks, got {new!r} on rank {rank} and {merged[name]!r} before",
                    path=name,
                )
    _check_distinct(merged)
    unknown = sorted(names.keys() - merged.keys()) if isinstance(names, Mapping) else []
    if unknown:
        raise PublishError(
            f"expected a table with the trainer's names alone, no rank has {shown(unknown)}", path=unknown[0]
        )


def shown(names: Sequence[str]) -> str:
    """Return the first of many names, for an error."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _check_distinct(renamed: Renamed) -> None:
    taken: dict[str, str] = {}
    for name, new in renamed.items():
        if new is not None and taken.setdefault(new, name) != name:
            raise PublishError(
                f"expected one tensor for the engine's name {new}, got another one beside {taken[new]}", path=name
            )


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _innermost(module: nn.Module) -> nn.Module:
    while (inner := _wrapped_in(module)) is not None:
        module = inner
    return module


def _wrapped_in(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module  # type: ignore[no-any-return]
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None
