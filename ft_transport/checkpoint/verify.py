"""Comparing the files of a checkpoint with what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ft_transport.checkpoint.chunk_reading import read_chunk
from ft_transport.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    decode_manifest,
    digests_of,
)
from ft_transport.errors import CheckpointDamagedError


def read_manifest(directory: Path, step: int) -> CheckpointManifest:
    """The list of files of the checkpoint of a step.

    Raises:
        CheckpointDamagedError: It is not what was written, or cannot be read.
    """
    try:
        encoded = (directory / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise CheckpointDamagedError(f"{MANIFEST_NAME} cannot be read: {error}", files=(MANIFEST_NAME,)) from error
    manifest = decode_manifest(encoded, name=MANIFEST_NAME)
    if manifest.step != step:
        raise CheckpointDamagedError(
            f"{MANIFEST_NAME}: expected that of step {step}, as the directory is named, got that of step "
            f"{manifest.step}",
            files=(MANIFEST_NAME,),
        )
    return manifest


def read_file(directory: Path, entry: FileEntry) -> bytes:
    """The content of a small file.

    Raises:
        CheckpointDamagedError: It is not what was written.
    """
    return b"".join(_chunks(directory, entry))


def find_damage(directory: Path, files: Sequence[FileEntry], check: Callable[[], None]) -> list[str]:
    """Reads files whole, and says of each that is not what was written what is wrong with it.

    Args:
        directory: Where they are.
        files: Which.
        check: Called now and then.
    """
    damaged = []
    for entry in files:
        try:
            for _ in _chunks(directory, entry):
                check()
        except CheckpointDamagedError as error:
            damaged.append(error.message)
    return damaged


def find_missing(directory: Path, files: Sequence[FileEntry]) -> list[str]:
    """Says of each file that is not there, or not of its length, what is wrong with it; reads none."""
    damaged = []
    for entry in files:
        try:
            num_bytes = os.stat(directory / entry.name).st_size
        except OSError as error:
            damaged.append(f"{entry.name}: cannot be opened: {error}")
            continue
        if num_bytes != entry.num_bytes:
            damaged.append(f"{entry.name}: expected {entry.num_bytes} bytes, it has {num_bytes}")
    return damaged


def _chunks(directory: Path, entry: FileEntry) -> Iterator[memoryview]:
    digests = digests_of(entry)
    try:
        descriptor = os.open(directory / entry.name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointDamagedError(f"{entry.name}: cannot be opened: {error}", files=(entry.name,)) from error
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes != entry.num_bytes:
            raise CheckpointDamagedError(
                f"{entry.name}: expected {entry.num_bytes} bytes, it has {num_bytes}", files=(entry.name,)
            )
        for number, start in enumerate(range(0, entry.num_bytes, CHUNK_BYTES)):
            end = min(start + CHUNK_BYTES, entry.num_bytes)
            yield memoryview(read_chunk(descriptor, entry, start, end, digests[number]))[:-1]
    finally:
        os.close(descriptor)
