"""Adapters that let the trainer of a framework use a manager. Only the user's import loads one, and its framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ft_transport.errors import ConfigurationError
from manager.state_manager import StateManager


def manager_of(manager: StateManager | None, settings: Mapping[str, Any]) -> StateManager:
    """Return ``manager``, or a new one with these settings.

    Raises:
        ConfigurationError: Both a manager and settings were given, or the settings contradict each other.
    """
    if manager is None:
        return StateManager(**settings)
    if settings:
        raise ConfigurationError(f"expected a manager or the settings of one, got both: manager and {sorted(settings)}")
    return manager
