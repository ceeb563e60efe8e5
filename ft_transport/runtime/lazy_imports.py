"""Facades that import each name on first use (PEP 562), so that nobody waits for the import of what goes unused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def import_on_use(namespace: dict[str, Any], names_by_module: Mapping[str, Sequence[str]]) -> None:
    """Gives a package the names of other modules, each of which is imported when one of its names is first used.

    Any thread may be the first to use a name: one thread imports a module, and the others wait for it.

    Args:
        namespace: The package's ``globals()``.
        names_by_module: The names, by the module that each comes from.
    """
    package: str = namespace["__name__"]
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def get_attribute(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Two threads that begin in different modules of torch break its import; both may begin here.
        import_module("torch")
        value = namespace[name] = getattr(import_module(module), name)
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of})

    namespace["__getattr__"] = get_attribute
    namespace["__dir__"] = list_names
