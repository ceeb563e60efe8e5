"""Encodes constants and named tuples, registers encodings for a user's own types, limits hash collisions.

Decoding never imports, calls or unpickles an object that the received bytes name. It takes constants from fixed tables,
named tuples from classes that this process has already loaded, and custom types from registered functions.

Hash collisions: Python randomizes the hashes of str and bytes in each process. But the hash of an int is its remainder
by 2^61 - 1. The hash of a tuple, a frozenset or a complex number is a formula of its parts (``sys.hash_info``;
Objects/tupleobject.c). So a peer could send any number of keys with the same hash. Building a dict of n such keys takes
quadratic time, in one call that blocks all other threads. `HashWatch` limits the number of keys with the same hash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
import torch

from ft_transport.errors import ConfigurationError, ManifestError
from ft_transport.state.python_values import is_small_int
from ft_transport.state.tensors import DTYPES_BY_NAME, name_of
from ft_transport.wire.nodes import STRIDE, CheckTime, ConstantNode, NamedTupleNode, Node

_CONSTANTS: Final[dict[str, Mapping[str, object]]] = {
    "dtype": DTYPES_BY_NAME,
    "layout": {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)},
    "memory_format": {str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The functions that encode and decode a user's own type, and the name of the encoding at sender and receiver."""

    name: str
    type: type[Any]
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_by_type: dict[type[Any], Encoding] = {}
_by_name: dict[str, Encoding] = {}


def register_encoding(
    type_: type[Any], *, name: str, encode: Callable[[Any], object], decode: Callable[[Any], object]
) -> None:
    """Register an encoding, so that a state may contain values of the type ``type_``.

    Sender and receiver must both register the encoding, before their first snapshot or fetch: this function is not
    thread-safe.

    Args:
        type_: The type. Values of its subclasses do not use this encoding.
        name: Name of the encoding on the wire: the same at sender and receiver, and not that of another encoding.
        encode: Turns a value into any nesting of supported kinds, including tensors. Called under the read lock.
        decode: The inverse of ``encode``. Its argument comes from the network, and may be forged.

    Raises:
        ConfigurationError: Another encoding has this name or this type.
    """
    encoding = Encoding(name=name, type=type_, encode=encode, decode=decode)
    for taken in (_by_type.get(type_), _by_name.get(name)):
        if taken is not None and (taken.type, taken.name) != (type_, name):
            raise ConfigurationError(
                f"expected a new name and a new type for an encoding, got {name!r} for {type_.__qualname__}, but "
                f"{taken.name!r} is registered for {taken.type.__qualname__}"
            )
    _by_type[type_] = encoding
    _by_name[name] = encoding


def encoding_for_type(type_: type[Any]) -> Encoding | None:
    """Return the encoding registered for exactly this type, not for a base class; ``None`` if there is none."""
    return _by_type.get(type_)


def encoding_for_name(name: str) -> Encoding | None:
    """Return the encoding that is registered under this name; ``None`` if there is none."""
    return _by_name.get(name)


def key_label(key: object) -> str:
    """Return the text by which paths name a key of a mapping. Calls no methods of user-defined types."""
    if type(key) is str:
        return key
    if type(key) is tuple:
        return f"({', '.join(key_label(item) for item in key)})"
    if type(key) is int:
        # Hexadecimal, because the conversion to decimal digits takes quadratic time.
        return str(key) if key.bit_length() <= 64 else f"{key:#x}"
    if key is None or type(key) in (bool, float, complex, bytes) or isinstance(key, np.generic):
        return repr(key)
    return f"<{type(key).__name__}>"


def encode_constant(value: object) -> Node | None:
    """Encode a dtype, device, layout or memory format of torch; return ``None`` for other values."""
    match value:
        case torch.dtype():
            return ConstantNode("dtype", name_of(value))
        case torch.device() | torch.layout() | torch.memory_format():
            return ConstantNode(type(value).__name__, str(value))  # type: ignore[arg-type]
        case _:
            return None


def decode_constant(node: ConstantNode) -> object:
    """Decode a dtype, device, layout or memory format of torch."""
    value: object | None = None
    if node.kind != "device":
        value = _CONSTANTS[node.kind].get(node.name)
    else:
        # A deprecated device warns, and a warning may be an error. torch cuts an index to 8 bits, so compare the name.
        with suppress(RuntimeError, Warning):
            value = found if str(found := torch.device(node.name)) == node.name else None
    if value is None:
        raise ManifestError(f"expected a {node.kind} that torch {torch.__version__} has, got {node.name[:64]!r}")
    return value


def is_named_tuple_type(type_: type[Any]) -> bool:
    """Return whether the type is a named tuple, judging by its attribute ``_fields``."""
    fields = getattr(type_, "_fields", None) if issubclass(type_, tuple) else None
    return isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def find_named_tuple_type(node: NamedTupleNode) -> type[Any] | None:
    """Return the named tuple class that a node names, if this process has loaded one with the same fields."""
    found: Any = sys.modules.get(node.module)
    for part in node.qualname.split("."):
        # Look only into the dictionaries of modules and classes. Any other look-up could run code for a received name:
        # a module's __getattr__, the import of a lazy module, a property.
        if issubclass(type(found), ModuleType):
            found = object.__getattribute__(found, "__dict__").get(part)
        elif issubclass(type(found), type):
            found = type.__getattribute__(found, "__dict__").get(part)
        else:
            return None
    if not issubclass(type(found), type) or not is_named_tuple_type(found):  # isinstance asks the object
        return None
    return found if list(found._fields) == node.fields else None


def named_tuple_type(node: NamedTupleNode) -> type[Any]:
    """Return the named tuple class that a node names, from a module that this process has loaded.

    Raises:
        ManifestError: No loaded module has the class, or its fields differ.
    """
    found = find_named_tuple_type(node)
    if found is None:
        raise ManifestError(
            f"expected the named tuple {node.module[:100]}.{node.qualname[:100]} with {len(node.fields)} fields "
            f"{node.fields[:10]} to be defined in this process; import its module before receiving, or register an "
            "encoding for it"
        )
    return found


T = TypeVar("T", bound=Sized)

MAX_EQUAL_HASHES: Final = 256
"""Maximum number of keys with the same hash in one container. Real states have few: -1 and -2 share a hash."""

_SPREAD: Final = frozenset({str, bytes, bool, float, type(None)})


class HashWatch:
    """Limits hash collisions among the keys of one container. `admit` is called before each insertion."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def admit(self, key: object, path: str) -> None:
        """Count a key, and raise if too many keys have its hash.

        Raises:
            ManifestError: More than `MAX_EQUAL_HASHES` keys have the same hash.
            TypeError: The key is not hashable.
        """
        if type(key) in _SPREAD or is_small_int(key):
            return
        hashed = hash(key)
        count = self._counts[hashed] = self._counts.get(hashed, 0) + 1
        if count > MAX_EQUAL_HASHES:
            raise ManifestError(
                f"expected keys with different hashes, got more than {MAX_EQUAL_HASHES} keys with the same hash",
                path=path,
            )


def set_of(items: Sequence[object], path: str, check_time: CheckTime) -> set[object]:
    """Build a set one member at a time, so that other threads can run.

    Raises:
        ManifestError: Two members are equal, or too many members have the same hash.
        TypeError: A member is not hashable.
    """
    watch = HashWatch()
    members: set[object] = set()
    for num_before, item in enumerate(items):
        if num_before % STRIDE == 0:
            check_time()
        watch.admit(item, path)
        members.add(item)
    return distinct(members, len(items), path)


def distinct(container: T, num_expected: int, path: str) -> T:
    """Return ``container`` if it has the expected number of keys or members.

    Raises:
        ManifestError: Some keys or members are equal, so the container has fewer.
    """
    if len(container) != num_expected:
        raise ManifestError(f"expected {num_expected} distinct keys or members, got {len(container)}", path=path)
    return container
