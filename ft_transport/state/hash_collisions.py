"""Limits hash collisions among keys and set members that a peer may have chosen to collide.

Python randomizes hashes of str and bytes in each process, and at most a few dozen small ints and floats share a hash.
But an int hashes to its remainder by 2^61 - 1, and a tuple, a frozenset or a complex number to a formula of its parts
(``sys.hash_info``; Objects/tupleobject.c). So a peer can send any number of keys with one hash, and a dict of n such
keys takes quadratic time in one call, which blocks all other threads.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final, TypeVar

from ft_transport.errors import ManifestError
from ft_transport.state.encodings import is_small_int
from ft_transport.wire.nodes import STRIDE, CheckTime

T = TypeVar("T", bound=Sized)

MAX_EQUAL_HASHES: Final = 256
"""Far more than in any real state: -1 and -2 share a hash, and so do tuples of them."""

_SPREAD: Final = frozenset({str, bytes, bool, float, type(None)})


class HashWatch:
    """Counts hash collisions among the keys of one container, before each insertion."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def admit(self, key: object, path: str) -> None:
        """Count a key.

        Raises:
            ManifestError: Too many keys have the same hash.
            TypeError: The key is not hashable.
        """
        if type(key) in _SPREAD or is_small_int(key):
            return
        hashed = hash(key)
        count = self._counts[hashed] = self._counts.get(hashed, 0) + 1
        if count > MAX_EQUAL_HASHES:
            raise ManifestError(
                f"expected keys that Python can tell apart quickly, got more than {MAX_EQUAL_HASHES} of one hash",
                path=path,
            )


def set_of(items: Sequence[object], path: str, check_time: CheckTime) -> set[object]:
    """Return the set of these members, built one by one so that other threads can run.

    Raises:
        ManifestError: Two members are equal, or too many have the same hash.
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
    """Return ``container`` if it has the expected length.

    Raises:
        ManifestError: Some keys or members were equal.
    """
    if len(container) != num_expected:
        raise ManifestError(f"expected {num_expected} distinct keys or members, got {len(container)}", path=path)
    return container
