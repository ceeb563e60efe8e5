"""Copies one checkpoint to another root: from a directory to a bucket, or back, or between two of a kind.

The list of files and its signature stay the same, so no key is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.chunk_reader import ChunkReader, DataFiles
from ft_transport.checkpoint.digested_file import DigestedFile
from ft_transport.checkpoint.files import CheckpointFiles, Identity, files_at, is_url
from ft_transport.checkpoint.manifest import (
    DATA_SUFFIX,
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    Trust,
    damaged,
    num_chunks_of,
)
from ft_transport.checkpoint.roots import CheckpointRoot, draw_attempt, root_at
from ft_transport.checkpoint.stored_files import ReadRetries, find_damage, read_encoded_manifest
from ft_transport.errors import CheckpointDamagedError, CheckpointExistsError, CheckpointNotFoundError

_STEP: Final = re.compile(r"(.+)/step-([0-9]{1,18})/?")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint in a directory or a bucket.

    Attributes:
        step: The step of the checkpoint.
        location: Its location (``files``).
    """

    step: int
    location: str

    @property
    def files(self) -> CheckpointFiles:
        """The files of the checkpoint."""
        return files_at(self.location)


def find_checkpoint(target: str) -> StoredCheckpoint:
    """Return the newest checkpoint of a root, or the one that ``target`` names.

    Args:
        target: The path or URL of a root, or of a ``step-N`` in it.

    Raises:
        CheckpointNotFoundError: No such checkpoint exists.
        OSError: The root cannot be read.
    """
    text = target if is_url(target) else str(Path(target).absolute())
    matched = _STEP.fullmatch(text)
    root = root_at(matched[1] if matched else text, "step")
    step = int(matched[2]) if matched else max(root.numbers(), default=None)
    location = root.find(step) if step is not None else None
    if step is None or location is None:
        raise CheckpointNotFoundError(
            f"expected a checkpoint in {root.name}, there are {root.numbers() or 'none'}", step=step
        )
    return StoredCheckpoint(step, location)


class Copier:
    """Copies checkpoints to another root, one after the other. Every byte is compared with its digest.

    A data file that the last copied checkpoint has is shared with the next one.

    Args:
        target: The other root, which this process has claimed.
        trust: Verifies the signatures of the lists of files.
        retry_s: How long failed reads of one checkpoint are retried, in seconds.
    """

    def __init__(self, target: CheckpointRoot, trust: Trust, retry_s: float) -> None:
        self._target = target
        self._trust = trust
        self._retry_s = retry_s
        self._last = ""
        self._copied: dict[FileEntry, Identity] = {}

    def copy(self, source: StoredCheckpoint, *, overwrite: bool = False) -> str:
        """Copy a checkpoint, unless the target has an undamaged copy. Return its location there.

        Args:
            source: The checkpoint.
            overwrite: Whether the copy may replace another checkpoint of this step. A damaged copy is always replaced.

        Raises:
            CheckpointExistsError: The target has another checkpoint of this step.
            CheckpointDamagedError: A file of the checkpoint differs from its digests.
            OSError: A file cannot be read or written.
        """
        target, step, retries = self._target, source.step, ReadRetries(self._retry_s)
        encoded = read_encoded_manifest(source.files, retries)
        manifest = self._trust.open(encoded, name=MANIFEST_NAME)
        there = target.find(step)
        if there is not None and _has_list(there, encoded, retries):
            if not find_damage(files_at(there), manifest.files, manifest.hash, retries, lambda: None):
                return there
        elif there is not None and not overwrite:
            raise CheckpointExistsError(
                f"expected no other checkpoint of this step in {target.name}, there is one", step=step
            )
        target.refuse_foreign(step)
        attempt = draw_attempt()
        target.begin(step, attempt)
        try:
            files = files_at(target.attempt(step, attempt))
            known = {entry: identity for entry, identity in self._copied.items() if entry in manifest.files}
            shared = {entry for entry, identity in known.items() if files.share(entry, identity, self._last)}
            copy_files(source.files, files, manifest, retries, is_copied=lambda entry: entry not in shared)
            copied = {each: files.identity(each) for each in manifest.files if each.name.endswith(DATA_SUFFIX)}
            files.put_shared(files.shared)
            files.sync()
            target.commit(step, attempt, encoded)
        except BaseException:
            target.discard(step)
            raise
        self._last, self._copied = target.final(step, attempt), copied
        return self._last


def _has_list(location: str, encoded: bytes, retries: ReadRetries) -> bool:
    try:
        return read_encoded_manifest(files_at(location), retries) == encoded
    except CheckpointDamagedError:
        return False


def copy_files(
    source: CheckpointFiles,
    target: CheckpointFiles,
    manifest: CheckpointManifest,
    retries: ReadRetries,
    *,
    is_copied: Callable[[FileEntry], bool],
) -> None:
    """Copy those files of a checkpoint for which ``is_copied`` returns ``True``, and compare their digests.

    Raises:
        CheckpointDamagedError: A file differs from its digests.
        OSError: A file cannot be read or written.
    """
    entries = [entry for entry in manifest.files if is_copied(entry)]
    damages = find_damage(source, entries, manifest.hash, retries, None)  # compares only the lengths
    if damages:
        raise CheckpointDamagedError("; ".join(damages), files=tuple(text.split(":")[0] for text in damages))
    files = DataFiles.of(source, entries, manifest.hash)
    with ChunkReader(files, range(files.num_chunks), retries) as reader:
        for entry in entries:
            with DigestedFile(target, entry.name, hash_name=manifest.hash) as file:
                for _ in range(num_chunks_of(entry.num_bytes)):
                    file.write(memoryview(reader.next())[:-1])
                if file.finish() != entry:
                    raise damaged(entry.name, "the file changed while it was copied")
