"""Facades that import each public name on first use (PEP 562), so that a program imports only the modules it needs."""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any


def import_on_use(namespace: dict[str, Any]) -> None:
    """Turn a package into a facade whose own source code lists its public names.

    Every ``from module import name as name`` in the package's source adds ``name`` to ``__all__``. If that import is
    under ``TYPE_CHECKING``, the module is imported when the program first reads ``name``, on any thread.

    Args:
        namespace: The package's ``globals()``.

    Raises:
        ImportError: The package was installed without its source code.
    """
    package: str = namespace["__name__"]
    source = namespace["__loader__"].get_source(package)
    if source is None:
        raise ImportError(
            f"expected {package} with its source code, from which the public names are read, got only compiled code; "
            "install the package with its .py files"
        )
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
        # torch's import fails if two threads start it at the same time from different modules of torch.
        import_module("torch")
        value = namespace[name] = getattr(import_module(module_of[name]), name)
        return value

    namespace["__all__"] = sorted(module_of)
    namespace["__getattr__"] = get_attribute
    namespace["__dir__"] = lambda: sorted({*namespace, *module_of})
