"""Checks the CRC-32 of each record of ``torch.save``: DCP stores a zip file for each part of a tensor."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ft_transport.cli.contents import Contents, StoredPart, UnreadableError
from ft_transport.cli.output import escape
from ft_transport.cli.saved_tensor import start_of, zip_entries
from ft_transport.cli.stored_file import StoredFile
from ft_transport.cli.stored_state import PartFinder, StoredState
from ft_transport.runtime.handler_safety import SafeExecutor

_NUM_THREADS: Final = 2
_BLOCK_BYTES: Final = 1 << 20
"""Length of one read."""
_BEFORE_ZIP: Final = b"\x80\x02\x8a\x0a"
"""The first bytes of the format before torch 1.6, which ``torch.save`` can still write: a pickled magic number."""

_Found: TypeAlias = "tuple[list[str], bool | None]"
"""The damages, and whether the records have checksums (``None``: unknown)."""


@dataclass(slots=True)
class Sums:
    """Numbers of a checkpoint's parts that were compared with their CRC-32s, and that have none."""

    num_compared: int = 0
    num_without: int = 0


def find_damage(path: Path, contents: Contents, sums: Sums) -> Iterator[str]:
    """Yield the damages in the data files of a DCP checkpoint: broken envelopes, and bytes that differ from their sums.

    Args:
        path: The directory of the checkpoint.
        contents: The contents with stored parts.
        sums: Counts the compared parts.
    """
    with StoredState(name="", contents=contents) as state:
        finder = PartFinder(path, state.files, takes_quantized=True)
        for troubles, has_sums in _Summing(finder).all_of(contents):
            sums.num_compared += has_sums is True
            sums.num_without += has_sums is False
            yield from troubles


class _Summing:
    def __init__(self, finder: PartFinder) -> None:
        self._finder = finder
        self._found: list[_Found | Future[_Found]] = []
        self._seen: set[StoredPart] = set()
        self._is_stopped = False

    def all_of(self, contents: Contents) -> list[_Found]:
        with SafeExecutor(_NUM_THREADS, "ft-transport-sum") as pool:
            try:
                for entry in contents.tensors:
                    try:
                        self._finder.tensor(entry)
                    except UnreadableError as error:
                        self._found.append(([error.message], None))
                        continue
                    for piece in entry.pieces:
                        self._begin(pool, entry.path, piece.stored)
                for name, part in contents.values.items():
                    self._begin(pool, name, part)
                return [each.result() if isinstance(each, Future) else each for each in self._found]
            finally:
                self._is_stopped = True

    def _begin(self, pool: SafeExecutor, name: str, part: StoredPart | None) -> None:
        if part is None or part in self._seen:
            return
        self._seen.add(part)
        try:
            file, at = self._finder.located(part, name)
        except UnreadableError as error:
            self._found.append(([error.message], None))
            return
        if part.is_zstd:
            # Expands one part at a time.
            self._found.append(self._sum_up(name, file, at))
            self._finder.drop(part)
        else:
            self._found.append(pool.submit(self._sum_up, name, file, at))

    def _sum_up(self, name: str, file: StoredFile, at: StoredPart) -> _Found:
        shown = f"{escape(at.file)}: {escape(name)}"
        try:
            read = self._finder.reader(file, at)
            if read(0, len(_BEFORE_ZIP)) == _BEFORE_ZIP:
                return [], False
            entries = zip_entries(read, at.num_bytes)
            if not any(entry.crc for entry in entries):
                return [], False
            troubles = []
            for entry in entries:
                start = at.start + start_of(entry, read, at.num_bytes)
                end = start + entry.num_bytes
                if self._crc_of(file, start, end) != entry.crc and not self._is_stopped:
                    troubles.append(
                        f"{shown}: its record {escape(entry.name)}, in bytes [{start}, {end}), differs from the CRC-32 "
                        "that torch.save has written"
                    )
            return troubles, True
        except (UnreadableError, OSError) as error:
            return [f"{shown}: {error}"], None

    def _crc_of(self, file: StoredFile, start: int, end: int) -> int:
        crc, buffer = 0, memoryview(bytearray(min(_BLOCK_BYTES, end - start)))
        while start < end and not self._is_stopped:
            num_bytes = os.preadv(file.descriptor, [buffer[: end - start]], start)
            if not num_bytes:
                raise UnreadableError("expected a file that does not change meanwhile, it became shorter")
            crc = zlib.crc32(buffer[:num_bytes], crc)
            start += num_bytes
        return crc
