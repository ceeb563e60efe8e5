"""Opens a file or the files of a checkpoint, and finds the position of each tensor, or of each of its boxes."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ft_transport.cli.contents import (
    ITEM_BITS,
    Box,
    Contents,
    NotFoundError,
    Read,
    StoredPart,
    TensorEntry,
    TensorPiece,
    UnreadableError,
    find_gap,
)
from ft_transport.cli.output import escape
from ft_transport.cli.saved_tensor import locate_tensor, start_of, zip_entries
from ft_transport.runtime.regular_files import open_regular

_READ_WHOLE_BYTES: Final = 16 << 10
"""Parts up to this length are read at once, instead of in several small reads."""
_MAX_AROUND_BYTES: Final = 1 << 20
"""Maximum number of bytes that ``torch.save`` adds to the elements of a tensor."""
_MAX_VALUE_BYTES: Final = 1 << 30
"""Maximum length of a decompressed value."""
_NOT_VALUES: Final = ("version", "byteorder")


class StoredFile:
    """An open file that several threads can read. It owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size
        self._map: mmap.mmap | None = None

    @classmethod
    def at(cls, path: Path) -> StoredFile:
        """Open a file. Symbolic links are followed, because a Hugging Face cache consists of them.

        Raises:
            NotFoundError: The file does not exist, or is not a regular file.
        """
        try:
            return cls(open_regular(Path(os.path.realpath(path))))
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise NotFoundError(f"expected a file at {path}: {getattr(error, 'strerror', error)}") from error

    def read(self, start: int, num_bytes: int) -> bytes:
        """Read bytes from position ``start``; fewer than ``num_bytes`` at the end of the file."""
        return os.pread(self.descriptor, num_bytes, start) if start < self.num_bytes else b""

    @property
    def mapped(self) -> mmap.mmap:
        """The whole file as mapped memory."""
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self.num_bytes, prot=mmap.PROT_READ)
        return self._map

    def close(self) -> None:
        """Close the file. Mapped memory stays valid until its last view is released."""
        self._map = None
        os.close(self.descriptor)


def path_in(directory: Path, name: str) -> Path:
    """Return the path of a file that a checkpoint or an index names.

    Args:
        directory: The directory of the checkpoint, or the path of a single file or an index.
        name: The name relative to the directory; empty for the single file.

    Raises:
        UnreadableError: The name points outside of the directory.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UnreadableError(
            f"expected a file in the directory of the checkpoint, got {escape(name)}, which is outside of it"
        )
    return (directory if directory.is_dir() else directory.parent) / name if name else directory


def expanded(file: StoredFile, part: StoredPart, *, most_bytes: int) -> StoredFile:
    """Decompress a part of a file into a temporary file without a name.

    Args:
        file: The file with the compressed part.
        part: The position of the part.
        most_bytes: Maximum decompressed length.

    Raises:
        UnreadableError: The part is damaged, or is longer than ``most_bytes`` when decompressed.
    """
    import zstandard

    # An empty file cannot be mapped.
    source = memoryview(file.mapped)[part.start : part.start + part.num_bytes] if part.num_bytes else b""
    with tempfile.TemporaryFile(prefix="ft-transport-") as into:
        try:
            for block in zstandard.ZstdDecompressor().read_to_iter(source):
                into.write(block)
                if into.tell() > most_bytes:
                    raise UnreadableError(f"expected at most {most_bytes} bytes after decompression, got more")
        except zstandard.ZstdError as error:
            raise UnreadableError(f"expected data in ZStandard's format: {error}") from error
        into.flush()
        return StoredFile(os.dup(into.fileno()))


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor that is stored in a file.

    Attributes:
        box: The box.
        file: The file.
        start: Position of the box's first element in the file, in bytes.
        strides: Strides in elements; ``None`` for row-major order.
    """

    box: Box
    file: StoredFile
    start: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, or another value in the form of a tensor of bytes. The pieces contain each element exactly once."""

    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Length of all elements, in bytes."""
        return sum(math.prod(piece.box[1]) for piece in self.pieces) * self.item_bytes


class StoredState:
    """An open file or checkpoint, with the positions of its tensors. As a context manager, it closes its files.

    Args:
        path: The file, the directory of the checkpoint, or the index.
        contents: The description of the file or checkpoint, with positions.
        name: The name of the state for messages, as the user wrote it.
        takes_quantized: Whether to accept quantized tensors, whose values depend on scales that are not compared.

    Attributes:
        contents: The given description.
        name: The given name.
        tensors: Positions of tensors by name, after `locate_all`.
        values: Positions of other values by name, after `locate_all`.
    """

    def __init__(self, path: Path, contents: Contents, *, name: str = "", takes_quantized: bool = False) -> None:
        self.contents = contents
        self.name = name
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, StoredTensor] = {}
        self._path = path
        self._takes_quantized = takes_quantized
        self._files: dict[str, StoredFile] = {}

    def __enter__(self) -> StoredState:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for file in self._files.values():
            file.close()

    def locate_all(self) -> None:
        """Find the positions of all tensors and values, without reading their data.

        Raises:
            UnreadableError: A tensor is incomplete, or a position is invalid.
        """
        self.tensors = {entry.path: self.tensor(entry) for entry in self.contents.tensors}
        parts = self.contents.values.items()
        self.values = {name: self.value(name, part) for name, part in parts if part is not None}

    def tensor(self, entry: TensorEntry) -> StoredTensor:
        """Find the position of a tensor.

        Raises:
            UnreadableError: The tensor is incomplete, or a position is invalid.
        """
        gap = find_gap(entry.shape, [(piece.offsets, piece.sizes) for piece in entry.pieces])
        if gap:
            raise UnreadableError(f"expected a complete tensor {escape(entry.path)}, but {gap}")
        bits = ITEM_BITS.get(entry.dtype)
        if bits is None or bits % 8:
            return self._bytes_of(entry)
        pieces = tuple(self._piece(entry, piece, bits // 8) for piece in entry.pieces)
        return StoredTensor(dtype=entry.dtype, shape=entry.shape, item_bytes=bits // 8, pieces=pieces)

    def value(self, name: str, part: StoredPart) -> StoredTensor:
        """Find the positions of a value's data: the entries of its zip file, except those that describe the writer."""
        file, part = self.located(part, name)
        read = self.reader(file, part)
        try:
            positions = [
                (part.start + start_of(entry, read, part.num_bytes), entry.num_bytes)
                for entry in zip_entries(read, part.num_bytes)
                if entry.name not in _NOT_VALUES and not entry.name.startswith(".")
            ]
        except UnreadableError:
            positions = [(part.start, part.num_bytes)]
        pieces, at = [], 0
        for start, num_bytes in positions:
            pieces.append(StoredPiece(((at,), (num_bytes,)), file, start))
            at += num_bytes
        return StoredTensor(dtype="bytes", shape=(at,), item_bytes=1, pieces=tuple(pieces))

    def _piece(self, entry: TensorEntry, piece: TensorPiece, item_bytes: int) -> StoredPiece:
        box, part = (piece.offsets, piece.sizes), piece.stored
        if part is None:
            raise UnreadableError(f"expected a complete tensor {escape(entry.path)}, but a part of it is not stored")
        file, part = self.located(part, entry.path, entry.num_bytes + _MAX_AROUND_BYTES)
        if part.is_raw:
            self._check_length(entry, part, math.prod(box[1]) * item_bytes)
            return StoredPiece(box, file, part.start)
        try:
            found = locate_tensor(self.reader(file, part), part.num_bytes, item_bytes)
        except UnreadableError as error:
            raise UnreadableError(f"{escape(entry.path)}: {error.message}") from error
        if found.shape != piece.sizes:
            raise UnreadableError(
                f"expected the shape {piece.sizes} of a part of {escape(entry.path)}, as the metadata says, got "
                f"{found.shape}"
            )
        if found.is_quantized and not self._takes_quantized:
            raise UnreadableError(
                f"expected a plain tensor, got {escape(entry.path)}, which is quantized: scales cannot be compared"
            )
        return StoredPiece(box, file, part.start + found.start, found.strides)

    def _bytes_of(self, entry: TensorEntry) -> StoredTensor:
        """Return a tensor as a tensor of bytes, because the size of its elements is unknown or a fraction of a byte."""
        piece = entry.pieces[0]
        assert piece.stored is not None, "the pieces of a safetensors file are"
        if len(entry.pieces) > 1:
            raise UnreadableError(f"expected {escape(entry.path)} in one part, because its dtype is {entry.dtype}")
        self._check_length(entry, piece.stored, entry.num_bytes)
        file = self._open(piece.stored, entry.path)
        bytes_of = StoredPiece(((0,), (entry.num_bytes,)), file, piece.stored.start)
        return StoredTensor(dtype=entry.dtype, shape=entry.shape, item_bytes=1, pieces=(bytes_of,))

    def _check_length(self, entry: TensorEntry, part: StoredPart, num_bytes: int) -> None:
        if part.num_bytes != num_bytes:
            raise UnreadableError(f"expected {num_bytes} stored bytes of {escape(entry.path)}, got {part.num_bytes}")

    def _open(self, part: StoredPart, name: str) -> StoredFile:
        file = self._files.get(part.file)
        if file is None:
            file = self._files[part.file] = StoredFile.at(path_in(self._path, part.file))
        start, end = part.start, part.start + part.num_bytes
        if start < 0 or end < start or end > file.num_bytes:
            where = escape(str(path_in(self._path, part.file)))
            raise UnreadableError(
                f"expected bytes [{start}, {end}) of {escape(name)} in {where}, got a file of {file.num_bytes} bytes"
            )
        return file

    def located(self, part: StoredPart, name: str, most_bytes: int = _MAX_VALUE_BYTES) -> tuple[StoredFile, StoredPart]:
        """Return the open file that contains a part, and the part's position in it. Decompresses a compressed part.

        Args:
            part: The position of the part in the checkpoint.
            name: The name of the tensor or value, for messages.
            most_bytes: Maximum decompressed length.

        Raises:
            UnreadableError: The file is missing or damaged.
        """
        file = self._open(part, name)
        if not part.is_zstd:
            return file, part
        key = _expanded_name(part)
        try:
            whole = self._files.get(key) or self._files.setdefault(key, expanded(file, part, most_bytes=most_bytes))
        except UnreadableError as error:
            raise UnreadableError(f"{escape(part.file)}: {escape(name)}: {error.message}") from error
        return whole, replace(part, start=0, num_bytes=whole.num_bytes, is_zstd=False)

    def drop(self, part: StoredPart) -> None:
        """Close the temporary file with the decompressed bytes of a part."""
        file = self._files.pop(_expanded_name(part), None)
        if file is not None:
            file.close()

    @staticmethod
    def reader(file: StoredFile, part: StoredPart) -> Read:
        """Return a function that reads bytes of a part, at positions relative to the start of the part."""
        if part.num_bytes <= _READ_WHOLE_BYTES:
            whole = file.read(part.start, part.num_bytes)
            return lambda start, num_bytes: whole[start : start + num_bytes]

        def read(start: int, num_bytes: int) -> bytes:
            return file.read(part.start + start, max(0, min(num_bytes, part.num_bytes - start)))

        return read


def _expanded_name(part: StoredPart) -> str:
    return f"{part.file}\0{part.start}"
