"""The objects of a class that are made meanwhile, such as the parts that a facade composes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def made(cls: type[T]) -> Iterator[list[T]]:
    """Lists what is made of a class, in order, for as long as it is open."""
    objects: list[T] = []
    construct = cls.__init__

    def construct_and_list(self: T, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        objects.append(self)

    cls.__init__ = construct_and_list  # type: ignore[method-assign]
    try:
        yield objects
    finally:
        cls.__init__ = construct  # type: ignore[method-assign]
