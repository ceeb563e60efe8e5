"""The checkpoints under a prefix in a bucket.

A file is deleted if the index (``bucket_index``) names neither its attempt nor an attempt that shares the file
(`BucketFiles.shared`). Other programs' objects are never deleted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace
from obstore.store import ObjectStore

from ft_transport.checkpoint.bucket_files import BucketFiles, list_objects, open_bucket, put_object
from ft_transport.checkpoint.bucket_index import BucketIndex, Index, delete_objects
from ft_transport.checkpoint.files import checked_url
from ft_transport.checkpoint.manifest import MANIFEST_NAME
from ft_transport.runtime.regular_files import UnusableFileError

logger = logging.getLogger(__name__)


class BucketRoot:
    """The checkpoints under a prefix in a bucket (`CheckpointRoot`).

    Args:
        url: URL of the prefix, such as ``s3://bucket/run-7``.
        prefix: The text before the hyphen in the names, such as ``step``.
        store: obstore's store of the prefix; by default, that of the URL.

    Attributes:
        name: The URL.

    Raises:
        ConfigurationError: obstore is not installed, or refuses the URL or the environment's settings.
    """

    def __init__(self, url: str, prefix: str, store: ObjectStore | None = None) -> None:
        self.name = checked_url(url)
        self._prefix = prefix
        self._ours = re.compile(
            rf"({prefix}-[0-9]{{1,18}}/attempt-[0-9a-f]{{16}})/.+|\.(?:owner-of-{prefix}s\.json|probe)-[0-9a-f]{{16}}"
        )
        self._store = store if store is not None else open_bucket(self.name)
        self._index = BucketIndex(self._store, self.name, f"{prefix}s.json")
        self.claim, self.release = self._index.claim, self._index.release
        self._writing: dict[int, str] = {}
        self._has_replaced = False

    def recover(self) -> None:
        """Delete the objects of attempts that were never committed."""
        self._sweep()

    def numbers(self) -> list[int]:
        """Return the numbers of all complete checkpoints, ascending."""
        return sorted(self._index.read().attempts)

    def find(self, number: int) -> str | None:
        """Return the location of a complete checkpoint; ``None`` if the index does not name it."""
        attempt = self._index.read().attempts.get(number)
        return self.attempt(number, int(attempt, 16)) if attempt is not None else None

    def identity(self, location: str) -> str | None:
        """Return the location, which has the number of the attempt; ``None`` if the index does not name it."""
        attempts = self._index.read().attempts.items()
        return location if any(self.attempt(number, int(each, 16)) == location for number, each in attempts) else None

    def foreign(self) -> dict[int, Path]:
        """Return an empty dict: names of attempts are never those of another program's objects."""
        return {}

    def refuse_foreign(self, number: int) -> None:
        """Do nothing."""

    def begin(self, number: int, attempt: int) -> None:
        """Protect the objects of an attempt from the deletion of leftovers."""
        self._writing[number] = self._folder(number, attempt)

    def attempt(self, number: int, attempt: int) -> str:
        """Return the URL of an attempt."""
        return f"{self.name}/{self._folder(number, attempt)}"

    def wait_for(self, number: int, attempt: int, check: Callable[[], None]) -> None:
        """Do nothing: an attempt needs no directory."""

    def commit(self, number: int, attempt: int, encoded: bytes | None) -> None:
        """Store the list of files, then name the attempt in the index.

        Raises:
            CheckpointInUseError: Another process has taken the root over.
            OSError: The bucket cannot be written.
        """
        if encoded is not None:
            put_object(self._store, f"{self._folder(number, attempt)}/{MANIFEST_NAME}", encoded)
        named = f"{attempt:016x}"
        self._has_replaced |= self.find(number) is not None
        self._index.change(lambda index: replace(index, attempts={**index.attempts, number: named}))
        self._writing.pop(number, None)

    def final(self, number: int, attempt: int) -> str:
        """Return the URL of an attempt, which its commit does not change."""
        return self.attempt(number, attempt)

    def discard(self, number: int) -> None:
        """Delete the objects of a failed attempt, unless its commit took effect although the answer was lost."""
        if self._writing.pop(number, None) is not None:
            # After this, a request of the failed commit that arrives late cannot take effect any more.
            self._index.change(lambda index: index)
            self._sweep()

    def retire(self, number: int) -> list[str]:
        """Remove a checkpoint from the index. Return its location."""
        found = self.find(number)

        def without(index: Index) -> Index:
            left = {each: attempt for each, attempt in index.attempts.items() if each != number}
            return replace(index, attempts=left)

        if found is None:
            return []
        self._index.change(without)
        return [found]

    def delete(self, retired: Sequence[str]) -> None:
        """Delete all objects that no checkpoint has or shares."""
        if retired or self._has_replaced:
            self._has_replaced = False
            self._sweep()

    def clear(self) -> None:
        """Delete all checkpoints."""
        self._index.change(lambda index: replace(index, attempts={}))
        self._sweep()

    # --------------------------------------------------------------------------------------------------------- objects

    def _folder(self, number: int, attempt: int) -> str:
        return f"{self._prefix}-{number}/attempt-{attempt:016x}"

    def _sweep(self) -> None:
        """Delete all objects of attempts that the index does not name, except those that named attempts share."""
        listed = list_objects(self._store)
        writing = set(self._writing.values())
        # Read after the listing: if this process still owns the root, no other owner wrote any of the listed objects.
        index = self._index.read()
        self._index.check_owner(index)
        named = {self._folder(number, int(each, 16)) for number, each in index.attempts.items()}
        shared: set[str] = set()
        for folder in named:
            try:
                shared.update(BucketFiles(f"{self.name}/{folder}", self._store).read_shared().values())
            except UnusableFileError as error:
                logger.warning("%s: nothing is deleted, because the shared files are unknown: %s", folder, error)
                return
        doomed = [
            path
            for path in listed
            if (matched := self._ours.fullmatch(path)) is not None
            and matched[1] not in named | writing
            and path.rpartition(".")[0] not in shared
            and path != self._index.beat_path
        ]
        delete_objects(self._store, doomed)
