"""Another name of the package ``manager``, for programs that have their own module or package ``manager``.

``from ft_transport.manager import Manager`` imports from this project's package, whatever ``import manager`` finds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules, walk_packages
from types import ModuleType
from typing import TYPE_CHECKING, Final

_NAME: Final = "manager"
_HOME: Final = Path(__file__).parents[1] / _NAME
_UNUSED: Final = ("manager.demo", "manager.integrations")
"""Not loaded: the adapters would load their frameworks, which may be missing."""


def _load() -> ModuleType:
    loaded = sys.modules.get(_NAME)
    hiding = PathFinder.find_spec(_NAME) if loaded is None else loaded.__spec__
    if hiding is None or (hiding.origin and Path(hiding.origin).resolve() == (_HOME / "__init__.py").resolve()):
        return import_module(_NAME)
    _check_names(hiding)
    spec = spec_from_file_location(_NAME, _HOME / "__init__.py", submodule_search_locations=[str(_HOME)])
    assert spec is not None, "a file of Python has a loader"
    assert spec.loader is not None, "a file of Python has a loader"
    package = sys.modules[_NAME] = module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
        # Loads every module now: afterwards the name stands for the program's own module, so an import of one of our
        # modules succeeds only if that module is loaded.
        for module in walk_packages(package.__path__, f"{_NAME}."):
            if not module.name.startswith(_UNUSED):
                import_module(module.name)
    finally:
        del sys.modules[_NAME]
        if loaded is not None:
            sys.modules[_NAME] = loaded
    return package


def _check_names(hiding: ModuleSpec) -> None:
    """Raise an error if the user's package ``manager`` and ours have modules of the same name: only one can load."""
    theirs = {module.name for module in iter_modules(hiding.submodule_search_locations)}
    common = sorted(theirs & {module.name for module in iter_modules([str(_HOME)])})
    if hiding.submodule_search_locations is not None and common:
        raise ImportError(
            f"expected the package in {', '.join(hiding.submodule_search_locations)} to share no module name with "
            f"ft-transport's package manager, but both have {', '.join(common)}; rename yours"
        )


if TYPE_CHECKING:
    from manager import *  # noqa: F403 - the same names
else:
    _package = _load()
    __all__ = list(_package.__all__)

    def __getattr__(name: str) -> object:
        return getattr(_package, name)

    def __dir__() -> list[str]:
        return dir(_package)
