"""These need frameworks that `make test-integrations` has an environment for; elsewhere they are not collected."""

from __future__ import annotations

import importlib.util

_TESTS = {"ray": ("ray",), "torchtitan": ("torchtitan",), "verl": ("verl",)}

collect_ignore = [
    f"test_{name}.py" for module, names in _TESTS.items() if importlib.util.find_spec(module) is None for name in names
]
