"""Keys and members of sets that a peer may have chosen so that they hash alike.

Python draws the hashes of str and bytes at random for each process, and those of small ints and floats are the same for
a few dozen values at most. But an int hashes to its remainder by 2^61 - 1, and a tuple, a frozenset or a complex number
to a formula of its parts (``sys.hash_info``; Objects/tupleobject.c): whoever knows that sends as many as they like of
one hash, and a dict of n of them takes time with the square of n, in one call that keeps all other threads waiting.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final, TypeVar

from ft_transport.errors import ManifestError
from ft_transport.state.encodings import is_small_int
from ft_transport.wire.tree_codec import STRIDE, CheckTime

T = TypeVar("T", bound=Sized)

MAX_EQUAL_HASHES: Final = 256
"""Far more than any state has by chance: -1 and -2 hash alike, and with them all tuples of so many of them."""

_SPREAD: Final = frozenset({str, bytes, bool, float, type(None)})


class HashWatch:
    """Looks at the keys of one container before they are put into it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def admit(self, key: object, path: str) -> None:
        """Takes note of a key.

        Raises:
            ManifestError: Too many before it have the same hash.
            TypeError: It has none.
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
    """The set of these members, made one by one, so that other threads have their turn.

    Raises:
        ManifestError: Two are equal, or too many have the same hash.
        TypeError: One has none.
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
    """What was made of so many keys or members.

    Raises:
        ManifestError: Some of them were equal.
    """
    if len(container) != num_expected:
        raise ManifestError(f"expected {num_expected} distinct keys or members, got {len(container)}", path=path)
    return container
