"""A file of a checkpoint, and its parts compressed by DCP's ZStandard extension."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from ft_transport.cli.contents import NotFoundError, StoredPart, UnreadableError
from ft_transport.cli.output import escape
from ft_transport.runtime.regular_files import open_regular

_MAX_NAME: Final = 200


class StoredFile:
    """A file for reading by several threads; owns its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size
        self._map: mmap.mmap | None = None

    @classmethod
    def at(cls, path: Path) -> StoredFile:
        """Open a file, also through links, which a Hugging Face cache consists of.

        Raises:
            NotFoundError: The file does not exist.
        """
        try:
            return cls(open_regular(Path(os.path.realpath(path))))
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise NotFoundError(f"expected a file at {path}: {getattr(error, 'strerror', error)}") from error

    def read(self, start: int, num_bytes: int) -> bytes:
        """Read a number of bytes from a position; fewer at the end."""
        return os.pread(self.descriptor, num_bytes, start) if start < self.num_bytes else b""

    @property
    def mapped(self) -> mmap.mmap:
        """Return the whole file as mapped memory."""
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self.num_bytes, prot=mmap.PROT_READ)
        return self._map

    def close(self) -> None:
        """Close the file; mapped memory lives until its last view."""
        self._map = None
        os.close(self.descriptor)


def path_in(directory: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint, or beside an index.

    Raises:
        UnreadableError: The name leads out of the directory.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UnreadableError(f"expected files of the checkpoint, {escape(name, _MAX_NAME)} lies outside of it")
    return (directory if directory.is_dir() else directory.parent) / name if name else directory


def expanded(file: StoredFile, part: StoredPart, *, most_bytes: int) -> StoredFile:
    """Decompress a part into an unnamed file.

    Args:
        file: The file with the part.
        part: The part.
        most_bytes: Maximum decompressed length.

    Raises:
        UnreadableError: The part is damaged, or too long.
    """
    import zstandard

    source = cast("IO[bytes]", _PartReader(file, part.start, part.num_bytes))
    with tempfile.TemporaryFile(prefix="ft-transport-") as into:
        try:
            for block in zstandard.ZstdDecompressor().read_to_iter(source):
                into.write(block)
                if into.tell() > most_bytes:
                    raise UnreadableError(f"expected what expands to at most {most_bytes} bytes, it becomes more")
        except zstandard.ZstdError as error:
            raise UnreadableError(f"expected what ZStandard has compressed: {error}") from error
        into.flush()
        return StoredFile(os.dup(into.fileno()))


@dataclass(slots=True)
class _PartReader:
    """A part of a file as a readable object for ``zstandard``."""

    file: StoredFile
    at: int
    num_left: int

    def read(self, num_bytes: int) -> bytes:
        block = self.file.read(self.at, min(num_bytes, self.num_left))
        self.at += len(block)
        self.num_left -= len(block)
        return block
