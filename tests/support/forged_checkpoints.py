"""Checkpoints whose files were changed, and whose list of files was made to fit them, as an attacker would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ft_transport.checkpoint.digested_file import digested
from ft_transport.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    decode_sealed,
    encode_manifest,
    encode_sealed,
)


def forge_manifest(directory: Path, change: Callable[[CheckpointManifest], CheckpointManifest]) -> None:
    """Writes another list of files, with the digest of its own that fits it."""
    path = directory / MANIFEST_NAME
    manifest, _, signature = decode_sealed(path.read_bytes(), name=MANIFEST_NAME)
    path.write_bytes(encode_sealed(encode_manifest(change(manifest)), signature))


def forge_file(directory: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """Changes a file, and its entry in the list of files with it."""
    path = directory / name
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    relist(directory, name)


def forge_json(directory: Path, name: str, change: Callable[[Any], None]) -> None:
    """As `forge_file`, for what is JSON."""

    def rewrite(content: bytearray) -> None:
        value = json.loads(content)
        change(value)
        content[:] = json.dumps(value).encode()

    forge_file(directory, name, rewrite)


def relist(directory: Path, name: str) -> None:
    """Has the list of files say what a file is now."""

    def change(manifest: CheckpointManifest) -> CheckpointManifest:
        entry = digested(directory / name, lambda: None, hash_name=manifest.hash)
        files: tuple[FileEntry, ...] = tuple(entry if each.name == name else each for each in manifest.files)
        return msgspec.structs.replace(manifest, files=files)

    forge_manifest(directory, change)
