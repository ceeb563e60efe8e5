"""What a trainer calls its tensors, and what an inference engine calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from torch import nn

from ft_transport.errors import PublishError

T = TypeVar("T")

_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""How ``torch.compile``, activation checkpointing and FSDP1 name what they wrap: no engine knows these names."""


def parameters_by_name(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module, by the names that they have without what wraps it or its parts."""
    inner: nn.Module | None = module
    while inner is not None:
        module, inner = inner, _wrapped_in(inner)
    for name, parameter in module.named_parameters():
        yield _without_wrappers(name), parameter


def unwrapped(tensors: Mapping[Any, T]) -> Mapping[Any, T]:
    """The same tensors by the names that they have without what wraps their modules.

    Raises:
        PublishError: Two of them have the same name then.
    """
    renamed: dict[Any, T] = {}
    for name, tensor in tensors.items():
        plain = _without_wrappers(name) if isinstance(name, str) else name
        if plain in renamed:
            raise PublishError(f"expected one tensor for the engine's name {plain}, got another one", path=name)
        renamed[plain] = tensor
    return renamed


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _wrapped_in(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module  # type: ignore[no-any-return]
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None
