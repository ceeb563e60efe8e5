"""Finds the items that have not changed since a rank's last write, and shares their data files with a new checkpoint.

The writer process remembers the place and the digest of each item that it has stored. An item with the same digest at
the next write is not written again: the new checkpoint shares its data file. In a directory, the file gets a hard link
(link(2)), so every checkpoint still contains all its files, for every reader, and the file system deletes a file with
its last link. In a bucket, the new checkpoint refers to the objects of the file (``bucket_files``).

A shared file may also contain items that have changed since. If they make up half of a file, the rest of its items is
written again, so that a checkpoint never takes more than twice the space of its state. Items that have not changed are
then written to a file of their own, which the next checkpoint can share as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import xxhash

from ft_transport.checkpoint.files import CheckpointFiles, Identity
from ft_transport.checkpoint.manifest import FileEntry
from ft_transport.checkpoint.write_items import Key, WriteItem

ItemForm: TypeAlias = tuple[int, Key, str, tuple[int, ...], bool]
"""All that determines the stored form of an item, except its bytes."""

_SAMPLE_BYTES: Final = 4096
_MAX_SHARED: Final = 15
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
    """A data file on disk or in a bucket.

    Attributes:
        entry: Its entry in the list of files.
        identity: Distinguishes it from any other content under its name.
    """

    entry: FileEntry
    identity: Identity

    @classmethod
    def of(cls, files: CheckpointFiles, entry: FileEntry) -> StoredDataFile:
        """Return the data file of an entry."""
        return cls(entry, files.identity(entry))


@dataclass(frozen=True, slots=True)
class StoredItems:
    """The data files of one rank in one checkpoint, and the items in them that are part of the checkpoint."""

    files: Mapping[str, StoredDataFile]
    items: Mapping[ItemForm, StoredItem]

    def digest_of(self, form: ItemForm) -> ItemDigest | None:
        """Return the digest of an item; ``None`` if these files do not have the item."""
        item = self.items.get(form)
        return item.digest if item is not None else None

    def share_unchanged(self, digests: Mapping[ItemForm, ItemDigest], last: str, files: CheckpointFiles) -> StoredItems:
        """Share data files of the last checkpoint with a new one, and return the unchanged items in these files.

        Args:
            digests: Digests of the items of the new checkpoint.
            last: Location of the last checkpoint. Files that were deleted there, or have changed, are not shared.
            files: The files of the new checkpoint.
        """
        unchanged = {form: item for form, item in self.items.items() if item.digest.equals(digests.get(form))}
        num_used = Counter[str]()
        for item in unchanged.values():
            num_used[item.file] += item.num_bytes
        most_used = [name for name, num in num_used.most_common() if 2 * num > self._length(name)]
        if len(most_used) > _MAX_SHARED:
            # The items of at least two files are then written to one.
            del most_used[_MAX_SHARED - 1 :]
        stored = (self.files[name] for name in most_used)
        shared = {each.entry.name: each for each in stored if files.share(each.entry, each.identity, last)}
        return StoredItems(shared, {form: item for form, item in unchanged.items() if item.file in shared})

    def _length(self, name: str) -> int:
        return self.files[name].entry.num_bytes


def form_of(item: WriteItem) -> ItemForm:
    """Return what determines the stored form of an item, except its bytes."""
    return item.part, item.key, item.dtype, item.shape, bool(item.names)
