"""Tensors where they are stored: in one file or in many, in one piece each or in boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from ft_transport.cli.contents import (
    ITEM_BITS,
    Contents,
    StoredPart,
    TensorEntry,
    TensorPiece,
    UnreadableError,
)
from ft_transport.cli.coverage import Box, find_gap
from ft_transport.cli.saved_tensor import locate_tensor, start_of, zip_entries
from ft_transport.cli.stored_file import StoredFile, expanded, path_in
from ft_transport.errors import escape_peer_text

_MAX_NAME: Final = 200
_READ_WHOLE_BYTES: Final = 16 << 10
"""Less than this is read at once, to look for what is in it."""
_MAX_AROUND_BYTES: Final = 1 << 20
"""Of what ``torch.save`` puts around a tensor."""
_MAX_VALUE_BYTES: Final = 1 << 30
"""Of a value that was compressed."""
_NOT_VALUES: Final = ("version", "byteorder")


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
        finder = PartFinder(path, state.files, takes_quantized=False)
        for entry in contents.tensors:
            state.tensors[entry.path] = finder.tensor(entry)
        for value, part in contents.values.items():
            if part is not None:
                state.values[value] = finder.value(value, part)
    except BaseException:
        state.__exit__(None, None, None)
        raise
    return state


class PartFinder:
    """Finds tensors and values in the files of a checkpoint.

    Args:
        path: The file, its directory, or the index.
        files: That are open, by name; more are added.
        takes_quantized: Whether a quantized tensor may be one: its elements are not all of it.
    """

    def __init__(self, path: Path, files: dict[str, StoredFile], *, takes_quantized: bool) -> None:
        self._path = path
        self._files = files
        self._takes_quantized = takes_quantized

    def tensor(self, entry: TensorEntry) -> StoredTensor:
        """Where all of a tensor is.

        Raises:
            UnreadableError: It is not whole, or not where it should be.
        """
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
        file, part = self.located(part, name)
        read = self.reader(file, part)
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
        file, part = self.located(part, entry.path, entry.num_bytes + _MAX_AROUND_BYTES)
        if part.is_raw:
            self._check_length(entry, part, _volume(box) * item_bytes)
            return StoredPiece(box, file, part.start)
        try:
            found = locate_tensor(self.reader(file, part), part.num_bytes, item_bytes)
        except UnreadableError as error:
            raise UnreadableError(f"{_shown(entry.path)}: {error.message}") from error
        if found.shape != piece.sizes:
            raise UnreadableError(
                f"expected {_shown(entry.path)} in parts as the metadata say, one of {piece.sizes} has {found.shape}"
            )
        if found.is_quantized and not self._takes_quantized:
            raise UnreadableError(
                f"expected a plain tensor, {_shown(entry.path)} is quantized: its scale is not compared"
            )
        return StoredPiece(box, file, part.start + found.start, found.strides)

    def _bytes_of(self, entry: TensorEntry) -> StoredTensor:
        """A tensor whose elements are no whole bytes, or unknown: its bytes alone."""
        piece = entry.pieces[0]
        assert piece.stored is not None, "that of a file is"
        if len(entry.pieces) > 1:
            raise UnreadableError(f"expected {_shown(entry.path)} in one part, {entry.dtype} is not divided into bytes")
        self._check_length(entry, piece.stored, entry.num_bytes)
        file = self._open(piece.stored, entry.path)
        bytes_of = StoredPiece(((0,), (entry.num_bytes,)), file, piece.stored.start)
        return StoredTensor(dtype=entry.dtype, shape=entry.shape, item_bytes=1, pieces=(bytes_of,))

    def _check_length(self, entry: TensorEntry, part: StoredPart, num_bytes: int) -> None:
        if part.num_bytes != num_bytes:
            raise UnreadableError(
                f"expected {num_bytes} bytes of {_shown(entry.path)}, {part.num_bytes} are stored of it"
            )

    def _open(self, part: StoredPart, name: str) -> StoredFile:
        file = self._files.get(part.file)
        if file is None:
            file = self._files[part.file] = StoredFile.at(path_in(self._path, part.file))
        start, end = part.start, part.start + part.num_bytes
        if start < 0 or end < start or end > file.num_bytes:
            where = _shown(str(path_in(self._path, part.file)))
            raise UnreadableError(
                f"expected bytes [{start}, {end}) of {_shown(name)} in {where}, it has {file.num_bytes}"
            )
        return file

    def located(self, part: StoredPart, name: str, most_bytes: int = _MAX_VALUE_BYTES) -> tuple[StoredFile, StoredPart]:
        """Opens the file of a part; of a compressed one a file that has it expanded.

        Raises:
            UnreadableError: It is not there, or damaged.
        """
        file = self._open(part, name)
        if not part.is_zstd:
            return file, part
        key = _expanded_name(part)
        try:
            whole = self._files.get(key) or self._files.setdefault(key, expanded(file, part, most_bytes=most_bytes))
        except UnreadableError as error:
            raise UnreadableError(f"{_shown(part.file)}: {_shown(name)}: {error.message}") from error
        return whole, replace(part, start=0, num_bytes=whole.num_bytes, is_zstd=False)

    def drop(self, part: StoredPart) -> None:
        """Closes the file that has a part expanded."""
        file = self._files.pop(_expanded_name(part), None)
        if file is not None:
            file.close()

    @staticmethod
    def reader(file: StoredFile, part: StoredPart) -> Callable[[int, int], bytes]:
        """Reads a part, from its beginning."""
        if part.num_bytes <= _READ_WHOLE_BYTES:
            whole = file.read(part.start, part.num_bytes)
            return lambda start, num_bytes: whole[start : start + num_bytes]

        def read(start: int, num_bytes: int) -> bytes:
            return file.read(part.start + start, max(0, min(num_bytes, part.num_bytes - start)))

        return read


def _expanded_name(part: StoredPart) -> str:
    return f"{part.file}\0{part.start}"


def _volume(box: Box) -> int:
    volume = 1
    for size in box[1]:
        volume *= size
    return volume


def _shown(text: str) -> str:
    return escape_peer_text(text, max_characters=_MAX_NAME)
