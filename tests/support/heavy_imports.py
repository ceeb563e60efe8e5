"""Imports of frameworks that few tests need, so that no other process waits for them."""

from __future__ import annotations

import gc
import importlib
import warnings
from typing import Any


def import_frozen(name: str) -> Any:
    """Import a module of ``tests/workers`` inside a test, and exempt what it has loaded from the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return module
