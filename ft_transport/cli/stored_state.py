"""Tensors where they are stored: in one file or in many, in one piece each or in boxes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from ft_transport.cli.contents import ITEM_BITS, Contents, StoredPart, TensorEntry, TensorPiece, UnreadableError
from ft_transport.cli.coverage import Box, find_gap
from ft_transport.cli.saved_tensor import locate_tensor, start_of, zip_entries
from ft_transport.errors import escape_peer_text
from ft_transport.runtime.regular_files import open_regular

_MAX_NAME: Final = 200
_READ_WHOLE_BYTES: Final = 16 << 10
"""Less than this is read at once, to look for what is in it."""
_NOT_VALUES: Final = ("version", "byteorder")


class StoredFile:
    """One file that is read from, by several threads."""

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor = open_regular(path)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise UnreadableError(f"expected a file at {path}: {getattr(error, 'strerror', error)}") from error
        self.num_bytes = os.fstat(self.descriptor).st_size
        self._map: mmap.mmap | None = None

    def read(self, start: int, num_bytes: int) -> bytes:
        """Fewer where there are no more."""
        return os.pread(self.descriptor, num_bytes, start) if start < self.num_bytes else b""

    @property
    def mapped(self) -> mmap.mmap:
        """All of it as memory."""
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self.num_bytes, prot=mmap.PROT_READ)
        return self._map

    def close(self) -> None:
        """What is mapped goes when nothing looks at it any more."""
        self._map = None
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor in a file: where its first element is, and its strides in elements; ``None``: row-major."""

    box: Box
    file: StoredFile
    start: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, or the bytes of a value; its pieces are all of it, each element once."""

    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return sum(_volume(piece.box) for piece in self.pieces) * self.item_bytes


@dataclass(slots=True, kw_only=True)
class StoredState:
    """All of a file or a checkpoint; a context manager that closes its files.

    Attributes:
        name: As the user calls it.
        contents: What it says of itself.
        tensors: By name.
        values: What is stored beside them, by name.
    """

    name: str
    contents: Contents
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)

    def __enter__(self) -> StoredState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self.files.values():
            file.close()


def open_state(name: str, path: Path, contents: Contents) -> StoredState:
    """Finds everything in its files, without reading it.

    Args:
        name: As the user calls it.
        path: The file, or the directory of the checkpoint.
        contents: With places.

    Raises:
        UnreadableError: A tensor is not whole, or not where it should be.
    """
    state = StoredState(name=name, contents=contents)
    try:
        finder = _Finder(path, contents, state.files)
        for entry in contents.tensors:
            state.tensors[entry.path] = finder.tensor(entry)
        for value, part in contents.values.items():
            if part is not None:
                state.values[value] = finder.value(value, part)
    except BaseException:
        state.__exit__(None, None, None)
        raise
    return state


def find_unreadable(path: Path, contents: Contents) -> Iterator[str]:
    """What stands in the way of `open_state`, tensor by tensor, also in the envelopes that ``torch.save`` makes."""
    with StoredState(name="", contents=contents) as state:
        finder = _Finder(path, contents, state.files)
        for entry in contents.tensors:
            try:
                finder.tensor(entry)
            except UnreadableError as error:
                yield error.message


def path_in(directory: Path, name: str) -> Path:
    """A file of a checkpoint.

    Raises:
        UnreadableError: It would be somewhere else.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UnreadableError(f"expected files of the checkpoint, {_shown(name)} lies outside of it")
    return directory / name if name else directory


class _Finder:
    def __init__(self, path: Path, contents: Contents, files: dict[str, StoredFile]) -> None:
        self._path = path
        self._contents = contents
        self._files = files

    def tensor(self, entry: TensorEntry) -> StoredTensor:
        gap = find_gap(entry.shape, [(piece.offsets, piece.sizes) for piece in entry.pieces])
        if gap:
            raise UnreadableError(f"expected the whole of {_shown(entry.path)}, {gap}")
        bits = ITEM_BITS.get(entry.dtype)
        if bits is None or bits % 8:
            return self._bytes_of(entry)
        pieces = tuple(self._piece(entry, piece, bits // 8) for piece in entry.pieces)
        return StoredTensor(dtype=entry.dtype, shape=entry.shape, item_bytes=bits // 8, pieces=pieces)

    def value(self, name: str, part: StoredPart) -> StoredTensor:
        """Of a zip file what is stored by name, without what says when and where it was made."""
        file, read = self._open(part, name), self._reader(part, name)
        try:
            places = [
                (part.start + start_of(entry, read, part.num_bytes), entry.num_bytes)
                for entry in zip_entries(read, part.num_bytes)
                if entry.name not in _NOT_VALUES and not entry.name.startswith(".")
            ]
        except UnreadableError:
            places = [(part.start, part.num_bytes)]
        pieces, at = [], 0
        for start, num_bytes in places:
            pieces.append(StoredPiece(((at,), (num_bytes,)), file, start))
            at += num_bytes
        return StoredTensor(dtype="bytes", shape=(at,), item_bytes=1, pieces=tuple(pieces))

    def _piece(self, entry: TensorEntry, piece: TensorPiece, item_bytes: int) -> StoredPiece:
        box, part = (piece.offsets, piece.sizes), piece.stored
        if part is None:
            raise UnreadableError(f"expected the whole of {_shown(entry.path)}, a part of it is nowhere stored")
        file = self._open(part, entry.path)
        if part.is_raw:
            self._check_length(entry, part, _volume(box) * item_bytes)
            return StoredPiece(box, file, self._contents.data_start + part.start)
        try:
            found = locate_tensor(self._reader(part, entry.path), part.num_bytes, item_bytes)
        except UnreadableError as error:
            raise UnreadableError(f"{_shown(entry.path)}: {error.message}") from error
        if found.shape != piece.sizes:
            raise UnreadableError(
                f"expected {_shown(entry.path)} in parts as the metadata say, one of {piece.sizes} has {found.shape}"
            )
        return StoredPiece(box, file, part.start + found.start, found.strides)

    def _bytes_of(self, entry: TensorEntry) -> StoredTensor:
        """A tensor whose elements are no whole bytes, or unknown: its bytes alone."""
        (piece,) = entry.pieces
        assert piece.stored is not None, "that of a file is"
        self._check_length(entry, piece.stored, entry.num_bytes)
        file = self._open(piece.stored, entry.path)
        start = self._contents.data_start + piece.stored.start
        bytes_of = StoredPiece(((0,), (entry.num_bytes,)), file, start)
        return StoredTensor(dtype=entry.dtype, shape=entry.shape, item_bytes=1, pieces=(bytes_of,))

    def _check_length(self, entry: TensorEntry, part: StoredPart, num_bytes: int) -> None:
        if part.num_bytes != num_bytes:
            raise UnreadableError(
                f"expected {num_bytes} bytes of {_shown(entry.path)}, {part.num_bytes} are stored of it"
            )

    def _open(self, part: StoredPart, name: str) -> StoredFile:
        file = self._files.get(part.file)
        if file is None:
            file = self._files[part.file] = StoredFile(path_in(self._path, part.file))
        start = self._contents.data_start + part.start
        if part.start < 0 or part.num_bytes < 0 or start + part.num_bytes > file.num_bytes:
            where = _shown(str(path_in(self._path, part.file)))
            raise UnreadableError(
                f"expected bytes [{start}, {start + part.num_bytes}) of {_shown(name)} in {where}, it has "
                f"{file.num_bytes}"
            )
        return file

    def _reader(self, part: StoredPart, name: str) -> Callable[[int, int], bytes]:
        file = self._open(part, name)
        if part.num_bytes <= _READ_WHOLE_BYTES:
            whole = file.read(part.start, part.num_bytes)
            return lambda start, num_bytes: whole[start : start + num_bytes]

        def read(start: int, num_bytes: int) -> bytes:
            return file.read(part.start + start, max(0, min(num_bytes, part.num_bytes - start)))

        return read


def _volume(box: Box) -> int:
    volume = 1
    for size in box[1]:
        volume *= size
    return volume


def _shown(text: str) -> str:
    return escape_peer_text(text, max_characters=_MAX_NAME)
