"""Finds the items that have not changed since a rank's last write, and links their data files into a new checkpoint.

The writer process remembers the place and the digest of each item that it has stored. An item with the same digest at
the next write is not written again: the new directory gets a hard link to its data file (link(2)). Every checkpoint
still contains all its files, for every reader. The file system deletes a file with its last link.

A linked file may also contain items that have changed since. If they make up half of a file, the rest of its items is
written again, so that a checkpoint never takes more than twice the space of its state. Items that have not changed are
then written to a file of their own, which the next checkpoint can share as a whole.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import xxhash

from ft_transport.checkpoint.manifest import FileEntry
from ft_transport.checkpoint.write_items import Key, WriteItem
from ft_transport.runtime.regular_files import make_read_only

ItemForm: TypeAlias = tuple[int, Key, str, tuple[int, ...], bool]
"""All that determines the stored form of an item, except its bytes."""

_SAMPLE_BYTES: Final = 4096
_MAX_LINKED: Final = 15
"""Most data files of a rank that a new checkpoint shares with the previous one."""


class ItemDigest(NamedTuple):
    """Digests by which an item counts as changed (xxh3, 128 bits).

    Attributes:
        sample: Digest of three blocks of the item.
        whole: Digest of all its bytes; ``None`` if the sample had changed, because training changes most tensors.
    """

    sample: bytes
    whole: bytes | None

    @classmethod
    def of(cls, data: memoryview, previous: ItemDigest | None) -> ItemDigest:
        """Digest an item.

        Args:
            data: The bytes of the item.
            previous: Digest of the same item at the last write; ``None`` at the first one.
        """
        middle = (len(data) - _SAMPLE_BYTES) // 2
        sample = xxhash.xxh3_128()
        for start in (0, max(0, middle), max(0, len(data) - _SAMPLE_BYTES)):
            sample.update(data[start : start + _SAMPLE_BYTES])
        if previous is not None and previous.sample != sample.digest():
            return cls(sample.digest(), None)
        return cls(sample.digest(), xxhash.xxh3_128_digest(data))

    def equals(self, other: ItemDigest | None) -> bool:
        """Return whether two items are known to be equal."""
        return self.whole is not None and self == other


class StoredItem(NamedTuple):
    """An item in a data file.

    Attributes:
        digest: Digest of the item's bytes.
        file: Name of the data file.
        start: Offset of the item, with what precedes its bytes in the form of ``torch.save``.
        num_bytes: Length in this form.
        data_start: Offset of the item's bytes.
    """

    digest: ItemDigest
    file: str
    start: int
    num_bytes: int
    data_start: int


@dataclass(frozen=True, slots=True)
class StoredDataFile:
    """A data file on disk.

    Attributes:
        entry: Its entry in the list of files.
        identity: Inode, length and modification time, which differ after another program has changed the file.
    """

    entry: FileEntry
    identity: tuple[int, int, int]

    @classmethod
    def of(cls, directory: Path, entry: FileEntry) -> StoredDataFile:
        """Return the data file of an entry in a directory."""
        return cls(entry, _identity(directory / entry.name))


@dataclass(frozen=True, slots=True)
class StoredItems:
    """The data files of one rank in one directory, and the items in them that are part of the checkpoint."""

    files: Mapping[str, StoredDataFile]
    items: Mapping[ItemForm, StoredItem]

    def digest_of(self, form: ItemForm) -> ItemDigest | None:
        """Return the digest of an item; ``None`` if these files do not have the item."""
        item = self.items.get(form)
        return item.digest if item is not None else None

    def link_unchanged(self, digests: Mapping[ItemForm, ItemDigest], source: Path, target: Path) -> StoredItems:
        """Link data files of the directory ``source`` into ``target``, and return the unchanged items in these files.

        Args:
            digests: Digests of the items of the new checkpoint.
            source: The directory of the last checkpoint. Files that it lacks, or has with another identity, are not
                linked.
            target: The new directory.
        """
        unchanged = {form: item for form, item in self.items.items() if item.digest.equals(digests.get(form))}
        num_used = Counter[str]()
        for item in unchanged.values():
            num_used[item.file] += item.num_bytes
        most_used = [name for name, num in num_used.most_common() if 2 * num > self._length(name)]
        if len(most_used) > _MAX_LINKED:
            # The items of at least two files are then written to one.
            del most_used[_MAX_LINKED - 1 :]
        linked = {name: self.files[name] for name in most_used if self._link(name, source, target)}
        return StoredItems(linked, {form: item for form, item in unchanged.items() if item.file in linked})

    def _length(self, name: str) -> int:
        return self.files[name].entry.num_bytes

    def _link(self, name: str, source: Path, target: Path) -> bool:
        """Link a data file. Return ``False`` if it was deleted or changed, or if the file system has no hard links."""
        path = target / name
        with contextlib.suppress(OSError):
            os.link(source / name, path, follow_symlinks=False)
            if _identity(path) == self.files[name].identity:
                # A program that overwrites a file of one checkpoint would change it in all of them.
                make_read_only(path)
                return True
        # A link may be there even after an error: NFS may carry a request out twice.
        with contextlib.suppress(OSError):
            path.unlink()
        return False


def form_of(item: WriteItem) -> ItemForm:
    """Return what determines the stored form of an item, except its bytes."""
    return item.part, item.key, item.dtype, item.shape, bool(item.names)


def _identity(path: Path) -> tuple[int, int, int]:
    status = os.stat(path, follow_symlinks=False)
    return status.st_ino, status.st_size, status.st_mtime_ns
