"""The directory of checkpoints: which names there are, and in which order files appear, so that a crash costs nothing.

One rank alone calls what is here. A checkpoint is written to ``step-N.incomplete``; when all its files and the list of
them are on disk, one rename makes it ``step-N``. So a directory of that name is complete at any instant. One that is
replaced is exchanged with its successor by one system call where the file system can do that. Where it cannot (NFS), it
becomes ``step-N.replaced`` first, which counts as ``step-N`` as long as there is no other. What is deleted gets the
name ``step-N.deleted`` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ft_transport.errors import CheckpointExistsError, CheckpointNotFoundError

logger = logging.getLogger(__name__)

MANIFEST_NAME: Final = "manifest.json"
"""Written last; a directory without it is no checkpoint, whatever its name."""

_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)(\.incomplete|\.replaced|\.deleted(?:-[0-9]+)?)?")
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2  # include/uapi/linux/fs.h


class CheckpointDirectory:
    """The checkpoints under one root. Not thread-safe.

    Args:
        root: Where they are; made if it is not there.

    Attributes:
        root: The same.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._warned_of: set[str] = set()

    def recover(self) -> list[str]:
        """Clears what an interrupted run has left, and puts back what it was about to replace.

        Returns:
            The names that were cleared.
        """
        cleared = []
        for name, step, suffix in self._names():
            path = self.root / name
            if suffix == ".replaced" and not self._is_complete(self.root / f"step-{step}"):
                with contextlib.suppress(FileNotFoundError):
                    self._remove(self.root / f"step-{step}")
                os.rename(path, self.root / f"step-{step}")
                sync_directory(self.root)
            elif suffix:
                self._remove(path)
                cleared.append(name)
        return cleared

    # ------------------------------------------------------------------------------------------------------- what is

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        found = set()
        for name, step, suffix in self._names():
            if suffix in ("", ".replaced"):
                if self._is_complete(self.root / name):
                    found.add(step)
                elif name not in self._warned_of:
                    self._warned_of.add(name)
                    logger.warning("%s has no %s and counts as no checkpoint", self.root / name, MANIFEST_NAME)
        return sorted(found)

    def path_of(self, step: int) -> Path:
        """The directory of a complete checkpoint.

        Raises:
            CheckpointNotFoundError: There is none of this step.
        """
        for name in (f"step-{step}", f"step-{step}.replaced"):
            if self._is_complete(self.root / name):
                return self.root / name
        raise CheckpointNotFoundError(
            f"expected a checkpoint in {self.root}, there are {self.steps() or 'none'}", step=step
        )

    # --------------------------------------------------------------------------------------------------------- saving

    def begin(self, step: int, marker: str, *, overwrite: bool) -> Path:
        """Makes the directory that a checkpoint is written to.

        Args:
            step: Its step.
            marker: Name of an empty file in it, by which other ranks know that they see this very directory.
            overwrite: Whether a complete checkpoint of this step may be replaced, once this one is complete.

        Raises:
            CheckpointExistsError: There is one, and it may not.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        if not overwrite and self._is_complete(self.root / f"step-{step}"):
            raise CheckpointExistsError(
                f"expected no checkpoint of this step in {self.root}, there is one; overwrite=True replaces it",
                step=step,
            )
        path = self.root / f"step-{step}.incomplete"
        if path.exists():
            self._remove(path)
        path.mkdir()
        (path / marker).touch()
        return path

    def commit(self, step: int, marker: str) -> Path:
        """Makes a checkpoint whose files and manifest are on disk the one of its step. Returns its directory."""
        incomplete, final = self.root / f"step-{step}.incomplete", self.root / f"step-{step}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(incomplete / marker)
        sync_directory(incomplete)
        if final.exists():
            self._replace(incomplete, final)
        else:
            os.rename(incomplete, final)
            sync_directory(self.root)
        return final

    def discard(self, step: int) -> None:
        """Removes what was written of a checkpoint that will not be complete."""
        with contextlib.suppress(FileNotFoundError):
            self._remove(self.root / f"step-{step}.incomplete")

    def retire(self, step: int) -> list[Path]:
        """Takes a checkpoint out of the list of those that there are.

        Returns:
            What is left to `delete`.
        """
        retired = []
        for name in (f"step-{step}", f"step-{step}.replaced"):
            with contextlib.suppress(FileNotFoundError):
                retired.append(self._without_name(self.root / name))
        return retired

    @staticmethod
    def delete(retired: Sequence[Path]) -> None:
        """Deletes what `retire` has left. On any thread."""
        for path in retired:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def clear(self) -> None:
        """Deletes all checkpoints, complete or not."""
        for name, _, _ in self._names():
            with contextlib.suppress(FileNotFoundError):
                self._remove(self.root / name)

    # --------------------------------------------------------------------------------------------------------- inside

    def _names(self) -> list[tuple[str, int, str]]:
        """Name, step and suffix of what is here and looks like ours."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        matches = [(name, _NAME.fullmatch(name)) for name in sorted(names)]
        return [(name, int(match[1]), match[2] or "") for name, match in matches if match is not None]

    @staticmethod
    def _is_complete(path: Path) -> bool:
        return (path / MANIFEST_NAME).is_file()

    def _replace(self, incomplete: Path, final: Path) -> None:
        if _exchange(incomplete, final):
            sync_directory(self.root)
            self._remove_in_time(incomplete)
            return
        replaced = final.with_name(final.name + ".replaced")
        if replaced.exists():
            self._remove(replaced)
        os.rename(final, replaced)
        os.rename(incomplete, final)
        sync_directory(self.root)
        self._remove_in_time(replaced)

    def _remove_in_time(self, path: Path) -> None:
        """Deletes what has a successor; whatever hinders it, the successor is complete."""
        try:
            self._remove(path)
        except OSError as error:
            logger.warning("%s could not be deleted yet: %s", path, error)

    def _remove(self, path: Path) -> None:
        """Deletes a directory; it loses its name first, so that nobody takes what is left for a whole."""
        shutil.rmtree(path if ".deleted" in path.name else self._without_name(path))

    def _without_name(self, path: Path) -> Path:
        base = path.name.split(".")[0]
        number = 0
        deleted = self.root / f"{base}.deleted"
        while deleted.exists():
            number += 1
            deleted = self.root / f"{base}.deleted-{number}"
        os.rename(path, deleted)
        sync_directory(self.root)
        return deleted


def step_of(path: Path) -> int | None:
    """The step whose checkpoint this directory is, by its name; ``None`` if it is none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match is not None and match[2] in (None, ".replaced") else None


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names at once. Returns whether this system and file system can."""
    if sys.platform != "linux":
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if not function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
