"""Settings and arguments: refused if they cannot work, and compared between ranks before anything else happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from ft_transport.coordination.consensus import Agreement
from ft_transport.errors import ConfigurationError
from ft_transport.settings import check_number

CheckpointSelector: TypeAlias = int | Literal["latest"]


def compare_settings(agreement: Agreement, phase: str, settings: Callable[[], Mapping[str, object]]) -> None:
    """Compares settings or arguments between ranks. All of them call it.

    Args:
        agreement: Of the group.
        phase: What is compared, for errors.
        settings: Returns this rank's, or raises what is wrong with them; compared as text.

    Raises:
        ConfigurationError: They differ; the same on all ranks.
        TransportError: What a rank's ``settings`` raised; the same on all ranks.
    """

    def say() -> bytes:
        return msgspec.msgpack.encode({name: repr(value) for name, value in settings().items()})

    said = [msgspec.msgpack.decode(each, type=dict[str, str]) for each in agreement.run_on_all_ranks(phase, say)]
    for name, first in said[0].items():
        for rank, each in enumerate(said):
            if each.get(name) != first:
                raise ConfigurationError(
                    f"expected the same {name} on all ranks, got {first} on rank 0 and {each.get(name)} on rank {rank}"
                )


def checked_root(root: object) -> Path:
    """The absolute path of a root.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise ConfigurationError(f"expected the path of a directory as root, got {root!r}")
    return Path(root).absolute()


def checked_selector(step: object) -> CheckpointSelector:
    """A step, or ``latest``.

    Raises:
        ConfigurationError: Says what was expected and what came.
    """
    if step == "latest":
        return "latest"
    if isinstance(step, str):
        raise ConfigurationError(f"expected a step, or 'latest', got {step!r}")
    return check_number("step", step, at_least=0)


def check_path(consolidate: object, rank_local: Sequence[str]) -> None:
    """Refuses what is no path of a part that all ranks share; ``None`` is none, and fine.

    Raises:
        ConfigurationError: Says what was expected and what came.
    """
    if consolidate is None:
        return
    if not isinstance(consolidate, str) or not all(consolidate.split(".")):
        raise ConfigurationError(
            f"expected the path of a part of the state, keys joined by dots, as consolidate, got {consolidate!r}"
        )
    if consolidate.split(".")[0] in rank_local:
        raise ConfigurationError(
            f"expected a part of what all ranks share as consolidate, {consolidate!r} is rank-local"
        )


def checked_keys(keys: object) -> tuple[str, ...]:
    """Top-level keys, each once.

    Raises:
        ConfigurationError: Says what was expected and what came.
    """
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ConfigurationError(f"expected a sequence of keys as rank_local, got {keys!r}")
    checked = [key for key in keys if isinstance(key, str)]
    if len(checked) < len(list(keys)):
        raise ConfigurationError(f"expected a sequence of keys as rank_local, got {keys!r}")
    return tuple(dict.fromkeys(checked))
