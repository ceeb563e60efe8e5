"""Whether a file or a checkpoint is whole, by what it says of itself and by how long its files are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ft_transport.cli.contents import ITEM_BITS, Contents, UnreadableError
from ft_transport.cli.coverage import find_gap
from ft_transport.cli.output import escape
from ft_transport.cli.stored_file import StoredFile, path_in
from ft_transport.errors import ManifestError

if TYPE_CHECKING:
    from ft_transport.wire.manifest import Manifest

DIGESTS: Final = "ft_transport.digests"
"""In the metadata of a snapshot's file."""


def tensor_troubles(contents: Contents) -> Iterator[str]:
    """Whether the parts of each are all of it, and in a DCP checkpoint as long as its elements."""
    for tensor in contents.tensors:
        name = escape(tensor.path)
        gap = find_gap(tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces])
        if gap:
            yield f"{name}: {gap}"
        for piece in tensor.pieces if contents.form == "dcp" else ():
            num_bytes = math.prod(piece.sizes) * ITEM_BITS[tensor.dtype] // 8
            if num_bytes and piece.stored is None:
                yield f"{name}: its part at {list(piece.offsets)} is nowhere stored"
            elif piece.stored is not None and not piece.stored.is_zstd and piece.stored.num_bytes < num_bytes:
                yield (
                    f"{name}: {tensor.dtype} of {list(piece.sizes)} takes {num_bytes} bytes, {piece.stored.num_bytes} "
                    "are stored"
                )


def file_troubles(path: Path, contents: Contents) -> Iterator[str]:
    """Whether the parts of a DCP checkpoint lie in their files, and none over another."""
    parts = [piece.stored for tensor in contents.tensors for piece in tensor.pieces] + [*contents.values.values()]
    by_file: dict[str, set[tuple[int, int]]] = {}
    for part in filter(None, parts):
        # Bytes that two names share are stored once.
        by_file.setdefault(part.file, set()).add((part.start, part.num_bytes))
    for name, places in by_file.items():
        shown = escape(name)
        try:
            file = StoredFile.at(path_in(path, name))
        except UnreadableError as error:
            yield f"{shown}: {error.message}"
            continue
        num_bytes = file.num_bytes
        file.close()
        end = 0
        for start, length in sorted(places):
            if start < 0 or length < 0 or start + length > num_bytes:
                yield f"{shown}: bytes [{start}, {start + length}) are not in its {num_bytes} bytes"
            elif start < end and length:
                yield f"{shown}: bytes [{start}, {start + length}) lie over others, which end at {end}"
            end = max(end, start + length)


def digest_troubles(path: Path) -> Iterator[str]:
    """Compares the chunks of a file that ``fetch`` has written with their digests.

    Raises:
        ManifestError: They cannot be compared: the job token is missing, or it is no such file.
    """
    from ft_transport.http.client.manifests import find_damaged
    from ft_transport.settings import default_num_threads
    from ft_transport.transfer.part_file import read_pieces

    file = StoredFile.at(path)
    try:
        manifest = read_manifest(file)
        if manifest.digests is None:
            raise ManifestError("expected digests, they were to come later")

        def views(start: int, end: int) -> Iterator[memoryview]:
            return read_pieces(file.descriptor, manifest.header_bytes + start, manifest.header_bytes + end)

        for chunk in find_damaged(manifest, views, num_threads=default_num_threads()):
            start, end = manifest.chunks.range_of(chunk, chunk + 1)
            yield f"{escape(path.name)}: bytes [{start}, {end}) of the data differ from their digest"
    finally:
        file.close()


def read_manifest(file: StoredFile) -> Manifest:
    """The manifest in a file that ``fetch`` has written.

    Raises:
        ManifestError: There is none, or it has digests of a job token that this process does not have.
    """
    from ft_transport.settings import TransportSettings
    from ft_transport.wire.manifest import MAX_HEADER_BYTES, decode_header

    keys = TransportSettings().keys()
    num_bytes = min(int.from_bytes(file.read(0, 8), "little"), MAX_HEADER_BYTES)
    return decode_header(file.read(8, num_bytes), keys=keys.current() if keys is not None else ())
