"""The structure of replicas' states. The quorum compares it and excludes replicas that cannot load the common state.

Pure digests and comparisons; ``manager.state.compatibility`` describes the states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

UNKNOWN: Final = ""
"""Digest of a part that is not compared."""
_NAMES_SUFFIX: Final = " (parameters)"
_ORDER_SUFFIX: Final = " (order of parameters)"
_PRESENT_ORDER_SUFFIX: Final = " (present order of parameters)"
_OPTIONAL: Final = (_NAMES_SUFFIX, _ORDER_SUFFIX, _PRESENT_ORDER_SUFFIX)
"""Suffixes of parts that exist only where the optimizer itself is registered, instead of functions of it."""
_MAX_SHOWN: Final = 5

Structure: TypeAlias = tuple[tuple[str, str], ...]
"""Sorted pairs of a part's name and a digest of its structure; `UNKNOWN` fits every digest."""
Tables: TypeAlias = Mapping[str, Mapping[str, str]]
"""Dtype and shape of each part's tensors by name; empty for a part that is not compared."""


def structure_of(tables: Tables) -> Structure:
    """Return the digests of the tables."""
    return tuple(sorted((key, _digest(table) if table else UNKNOWN) for key, table in tables.items()))


def misfits(own: Structure, other: Structure) -> tuple[str, ...]:
    """Return the parts of ``own`` that could not load ``other``'s, sorted. Empty structures fit."""
    return tuple(key for key in _differing(own, other) if not key.endswith(_PRESENT_ORDER_SUFFIX))


def is_in_other_order(own: Structure, other: Structure) -> bool:
    """Return whether optimizers of ``own`` have another order of parameters, which a heal takes over."""
    return any(key.endswith(_PRESENT_ORDER_SUFFIX) for key in _differing(own, other))


def order_tables(key: str, names: Sequence[Sequence[str]], *, may_change: bool) -> Tables:
    """Describe the order of an optimizer's parameters.

    Args:
        key: The optimizer's key.
        names: Its parameters' names, by group.
        may_change: Whether a replica that heals takes over another order; otherwise the order is compared.
    """
    places = {
        f"param_groups.{group}.params.{position}": name
        for group, names_of_group in enumerate(names)
        for position, name in enumerate(names_of_group)
    }
    if not may_change:
        return {f"{key}{_ORDER_SUFFIX}": places}
    groups = {name: f"in param_groups.{group}" for group, names_of_group in enumerate(names) for name in names_of_group}
    return {f"{key}{_NAMES_SUFFIX}": groups, f"{key}{_PRESENT_ORDER_SUFFIX}": places}


def _differing(own: Structure, other: Structure) -> list[str]:
    if not own or not other:
        return []
    mine, theirs = dict(own), dict(other)
    return [key for key in sorted({*mine, *theirs}) if not _fits(_part(mine, key), _part(theirs, key))]


def _part(structure: Mapping[str, str], key: str) -> str | None:
    return structure.get(key, UNKNOWN if key.endswith(_OPTIONAL) else None)


def _fits(own: str | None, other: str | None) -> bool:
    if own is None or other is None:
        return False
    return own == other or UNKNOWN in {own, other}


def usual_structure(structures: Sequence[Structure]) -> Structure | None:
    """Return the structure that more than half of the replicas fit; ``None`` without one."""
    for structure in structures:
        if structure and 2 * sum(not misfits(each, structure) for each in structures) > len(structures):
            return structure
    return None


def describe(parts: tuple[str, ...], own: Tables, other: Tables | None) -> str:
    """Describe the differences.

    Args:
        parts: The result of `misfits`.
        own: This replica's tables.
        other: The other replica's tables; ``None`` if unknown.
    """
    if other is None:
        return f"another state under {list(parts)}"
    told = []
    missing, unexpected = (
        sorted(key for key in one.keys() - two.keys() if not key.endswith(_OPTIONAL))
        for one, two in ((own, other), (other, own))
    )
    if missing or unexpected:
        told.append(f"keys that are registered here alone: {missing}, there alone: {unexpected}")
    for key in parts:
        mine, theirs = own.get(key, {}), other.get(key, {})
        told += [
            f"{key}.{name} is {mine.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in {**mine, **theirs}
            if key in own and key in other and mine.get(name) != theirs.get(name)
        ]
    if not told:
        told.append(f"another state under {list(parts)} on another rank, or had one before")
    more = f"; and {len(told) - _MAX_SHOWN} more" if len(told) > _MAX_SHOWN else ""
    return "; ".join(told[:_MAX_SHOWN]) + more


def _digest(table: Mapping[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(table.items())).encode(), digest_size=8).hexdigest()
