"""Facades that import each name on first use (PEP 562), so that no program waits for a module that it does not use."""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any


def import_on_use(namespace: dict[str, Any]) -> None:
    """Makes a package a facade: its own source is the table of its names, which type checkers read as well.

    Every ``from module import name as name`` of the source declares a name of ``__all__``. A name that only type
    checkers import comes on first use. Any thread may be the first: it imports the module, and the others wait for it.

    Args:
        namespace: The package's ``globals()``.

    Raises:
        ImportError: The package came without its source.
    """
    package: str = namespace["__name__"]
    source = namespace["__loader__"].get_source(package)
    if source is None:
        raise ImportError(f"expected the source of {package}, which lists its names, and only compiled code came")
    module_of = {
        alias.asname: str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }

    def get_attribute(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Two threads that begin in different modules of torch break its import; both may begin here.
        import_module("torch")
        value = namespace[name] = getattr(import_module(module_of[name]), name)
        return value

    namespace["__all__"] = sorted(module_of)
    namespace["__getattr__"] = get_attribute
    namespace["__dir__"] = lambda: sorted({*namespace, *module_of})
