"""Verification of a checkpoint: comparison of its files with their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.hashing import HashName
from ft_transport.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    StoredRank,
    decode_rank_file,
    rank_file_name,
)
from ft_transport.checkpoint.patience import Patience
from ft_transport.checkpoint.signing import Trust
from ft_transport.checkpoint.stored_file import StoredFile
from ft_transport.errors import CheckpointDamagedError
from ft_transport.runtime.regular_files import read_regular

_MAX_MANIFEST_BYTES: Final = 1 << 30
"""The digests of 100 TB take less."""
_MAX_RANK_FILE_BYTES: Final = 1 << 30
"""Larger than the descriptions of all parts of a snapshot may be (``wire.manifest``)."""


def read_manifest(directory: Path, step: int | None, trust: Trust, patience: Patience) -> CheckpointManifest:
    """Return the list of files of a checkpoint; a ``step`` of ``None`` accepts any, for a directory with another name.

    Raises:
        CheckpointDamagedError: The list was changed, or is missing.
        CheckpointUntrustedError: The job token has not signed it.
        OSError: The list cannot be read.
    """
    path = directory / MANIFEST_NAME
    encoded = patience.read(MANIFEST_NAME, lambda: read_regular(path, max_bytes=_MAX_MANIFEST_BYTES))
    manifest = trust.open(encoded, name=MANIFEST_NAME)
    if step is not None and manifest.step != step:
        raise CheckpointDamagedError(
            f"{MANIFEST_NAME}: expected that of step {step}, as the directory is named, got that of step "
            f"{manifest.step}",
            files=(MANIFEST_NAME,),
        )
    return manifest


def read_rank_files(directory: Path, manifest: CheckpointManifest, patience: Patience) -> list[bytes]:
    """Return each rank's description, still encoded.

    Raises:
        CheckpointDamagedError: A description differs from its digest, or has impossible content.
        OSError: A description cannot be read.
    """
    entries = {entry.name: entry for entry in manifest.files}
    encoded = []
    for rank in range(manifest.num_ranks):
        name = rank_file_name(rank)
        entry = entries.get(name)
        if entry is None:
            raise CheckpointDamagedError(f"{MANIFEST_NAME} does not list {name}", files=(MANIFEST_NAME,))
        if entry.num_bytes > _MAX_RANK_FILE_BYTES:
            raise CheckpointDamagedError(
                f"{name}: expected at most {_MAX_RANK_FILE_BYTES} bytes, it has {entry.num_bytes}", files=(name,)
            )
        encoded.append(read_file(directory, entry, manifest.hash, patience))
    return encoded


def decode_rank_files(encoded: Sequence[bytes], manifest: CheckpointManifest) -> list[StoredRank]:
    """Decode the ranks' descriptions.

    Raises:
        CheckpointDamagedError: A description has impossible content.
    """
    entries = {entry.name: entry for entry in manifest.files}
    ranks = []
    for rank, each in enumerate(encoded):
        name = rank_file_name(rank)
        stored = decode_rank_file(each, name=name)
        if stored.data_file not in entries:
            raise CheckpointDamagedError(
                f"{name}: expected a data file that {MANIFEST_NAME} lists, got {stored.data_file[:80]!r}",
                files=(name,),
            )
        if len(stored.manifests) != (2 if manifest.local_keys else 1):
            raise CheckpointDamagedError(
                f"{name}: expected a part for each kind of state, got {len(stored.manifests)}", files=(name,)
            )
        stored.check_positions(entries[stored.data_file].num_bytes, name=name)
        ranks.append(stored)
    return ranks


def read_file(directory: Path, entry: FileEntry, hash_name: HashName, patience: Patience) -> bytes:
    """Return the content of a small file.

    Raises:
        CheckpointDamagedError: The file differs from its digest.
        OSError: The file cannot be read.
    """
    return b"".join(_chunks(directory, entry, hash_name, patience))


def find_damage(
    directory: Path,
    files: Sequence[FileEntry],
    hash_name: HashName,
    patience: Patience,
    check: Callable[[], None],
) -> list[str]:
    """Read files completely, and return a description of the damage of each damaged file.

    Args:
        directory: The files' directory.
        files: The files to read.
        hash_name: Hash function of their digests.
        patience: Retries reads that may succeed later.
        check: Called now and then.

    Raises:
        OSError: A file cannot be read.
    """
    damaged = []
    for entry in files:
        try:
            for _ in _chunks(directory, entry, hash_name, patience):
                check()
        except CheckpointDamagedError as error:
            damaged.append(error.message)
    return damaged


def find_missing(directory: Path, manifest: CheckpointManifest, patience: Patience) -> list[str]:
    """Return a description of each file that is missing or has another length; read none.

    Raises:
        OSError: The length of a file cannot be read.
    """
    damaged = []
    for entry in manifest.files:
        try:
            with StoredFile(directory, entry, manifest.hash, patience) as file:
                file.check_length()
        except CheckpointDamagedError as error:
            damaged.append(error.message)
    return damaged


def _chunks(directory: Path, entry: FileEntry, hash_name: HashName, patience: Patience) -> Iterator[memoryview]:
    with StoredFile(directory, entry, hash_name, patience) as file:
        file.check_length()
        for number in range(file.num_chunks):
            yield memoryview(file.read(number))[:-1]
