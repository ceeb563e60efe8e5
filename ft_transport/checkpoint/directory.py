"""Numbered directories, ``step-N`` or ``version-N``, that are complete or absent even after a crash.

Only one rank of a group uses this module. That rank writes files to ``step-N.incomplete``, and renames the directory to
``step-N`` when all files are on disk. If ``step-N`` already exists, one system call exchanges the two directories. On
file systems without this call (NFS), the old directory is first renamed to ``step-N.replaced``, which counts as
``step-N`` as long as no ``step-N`` exists. A directory that is to be deleted is first renamed to ``step-N.deleted``.

A ``step-N`` that another program wrote is called foreign. It is not listed, and never replaced or deleted.
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.manifest import DATA_SUFFIX, rank_file_name
from ft_transport.errors import CheckpointExistsError
from ft_transport.runtime.regular_files import is_directory, is_regular, make_directory, sync_directory

logger = logging.getLogger(__name__)

_SUFFIXES: Final = r"(\.incomplete|\.replaced|\.deleted(?:-[0-9]+)?)?"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2  # include/uapi/linux/fs.h
_VISIBLE_S: Final = 30.0
"""How long a new path may take to become visible on another host."""
_LOOK_S: Final = 0.02
_MAX_DIGITS: Final = 18
MAX_NUMBER: Final = 10**_MAX_DIGITS - 1
"""Directories with larger numbers are ignored. A larger step would not fit into the messages between ranks."""


class NumberedDirectory:
    """The numbered directories under one root. Two threads may work on different numbers at the same time.

    Args:
        root: The parent directory; created if it is missing.
        prefix: The text before the hyphen in the directories' names, such as ``step``.
        last_file: Name of the file that is written last. A directory without this file is incomplete, even under its
            final name. With ``None``, every directory under a final name is complete, but a link to a directory is not.
        is_private: Whether only the owner may read new directories and files. Otherwise the umask decides.

    Attributes:
        root: The parent directory.
        prefix: The text before the hyphen in the directories' names.
        is_private: Whether only the owner may read new directories and files.
    """

    def __init__(self, root: Path, prefix: str, last_file: str | None, *, is_private: bool = False) -> None:
        self.root = root
        self.prefix = prefix
        self._last_file = last_file
        self.is_private = is_private
        self._pattern = re.compile(rf"{prefix}-(0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}}){_SUFFIXES}")
        self._warned_of: set[str] = set()

    def recover(self) -> None:
        """Delete the leftovers of an interrupted run, and restore directories that the run was replacing.

        Logs a warning for a leftover that cannot be deleted, such as another user's directory.
        """
        for path, number, suffix in self._found():
            try:
                final = self._path(number)
                if suffix == ".replaced" and self._is_complete(path) and not self._is_complete(final):
                    if not self._is_foreign(final):
                        self._put_back(path, final)
                elif suffix:
                    self._remove(path)
            except OSError as error:
                self._warn_once(path, "could not be deleted, and is ignored: %s", error)

    # -------------------------------------------------------------------------------------------------------- reading

    def numbers(self) -> list[int]:
        """Return the numbers of all complete directories, ascending."""
        found = set()
        for path, number, suffix in self._found():
            if suffix in ("", ".replaced"):
                if self._is_complete(path):
                    found.add(number)
                elif self._is_foreign(path):
                    self._warn_once(
                        path, "was written by another program: no save replaces it, and no prune or clear removes it"
                    )
                elif self._last_file is not None:
                    self._warn_once(path, "has no %s and is ignored", self._last_file)
        return sorted(found)

    def find(self, number: int) -> Path | None:
        """Return the path of the directory with this number; ``None`` if it is missing or incomplete."""
        paths = (self._path(number), self._path(number, ".replaced"))
        return next((path for path in paths if self._is_complete(path)), None)

    def foreign(self) -> dict[int, Path]:
        """Return the directories named like ``step-N`` that another program wrote, by number, ascending."""
        found = {number: path for path, number, suffix in self._found() if not suffix and self._is_foreign(path)}
        return dict(sorted(found.items()))

    def refuse_foreign(self, number: int) -> None:
        """Raise an error if another program wrote the directory with this number, because a save must not replace it.

        Raises:
            CheckpointExistsError: Another program wrote the directory.
        """
        path = self._path(number)
        if self._is_foreign(path):
            raise CheckpointExistsError(
                f"{path} contains files of another program, which a save never overwrites; move that directory away, "
                "or save to another root",
                step=number,
            )

    # -------------------------------------------------------------------------------------------------------- writing

    def begin(self, number: int) -> Path:
        """Create an empty ``.incomplete`` directory for the files of a number, and return its path."""
        make_directory(self.root, is_private=self.is_private, is_ok_if_there=True)
        path = self.incomplete(number)
        if os.path.lexists(path):
            # Renaming frees the name even if the old directory cannot be deleted.
            self._remove_in_time(self._without_name(path))
        make_directory(path, is_private=self.is_private)
        return path

    def incomplete(self, number: int) -> Path:
        """Return the path of the directory that `begin` creates for a number."""
        return self._path(number, ".incomplete")

    def final(self, number: int) -> Path:
        """Return the path of the directory that `commit` creates for a number."""
        return self._path(number)

    def commit(self, number: int) -> Path:
        """Rename the incomplete directory to its final name, and return the new path. All its files must be on disk."""
        incomplete, final = self.incomplete(number), self.final(number)
        sync_directory(incomplete)
        if os.path.lexists(final):
            self._replace(incomplete, final)
        else:
            os.rename(incomplete, final)
            sync_directory(self.root)
        return final

    def discard(self, number: int) -> None:
        """Delete the incomplete directory of a number, after a write has failed."""
        with contextlib.suppress(FileNotFoundError):
            self._remove(self.incomplete(number))

    def retire(self, number: int) -> list[Path]:
        """Rename the directory of a number, so that it is no longer listed or found.

        Returns:
            The new paths, for `delete`.
        """
        retired = []
        for path in (self._path(number), self._path(number, ".replaced")):
            with contextlib.suppress(FileNotFoundError):
                retired.append(self._without_name(path))
        return retired

    @staticmethod
    def delete(retired: Sequence[Path]) -> None:
        """Delete directories that `retire` has renamed. Any thread may call this."""
        for path in retired:
            with contextlib.suppress(FileNotFoundError):
                _delete(path)

    def clear(self) -> None:
        """Delete all directories, complete or not, except those that another program wrote.

        Raises:
            OSError: A complete directory could not be deleted.
        """
        for path, _, suffix in self._found():
            try:
                if suffix or not self._is_foreign(path):
                    self._remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if suffix in ("", ".replaced") and os.path.lexists(path):
                    raise
                self._warn_once(path, "could not be deleted, and is ignored: %s", error)

    # --------------------------------------------------------------------------------------------------------- inside

    def _path(self, number: int, suffix: str = "") -> Path:
        return self.root / f"{self.prefix}-{number}{suffix}"

    def _found(self) -> list[tuple[Path, int, str]]:
        """Return path, number and suffix of each directory entry named like a numbered directory."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        matches = [(name, self._pattern.fullmatch(name)) for name in sorted(names)]
        return [(self.root / name, int(match[1]), match[2] or "") for name, match in matches if match is not None]

    def _is_complete(self, path: Path) -> bool:
        if self._last_file is None:
            return is_directory(path)
        return is_regular(path / self._last_file)

    def _is_foreign(self, path: Path) -> bool:
        """Return whether another program wrote the directory, the file or the link at this path.

        A directory with a rank file of this package is not foreign. A directory with only data files is not foreign
        either: an interrupted ``dcp.save`` leaves such a directory.
        """
        if self._last_file is None or self._is_complete(path):
            return False
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return False
        except OSError:  # a file, or another user's directory
            return True
        return rank_file_name(0) not in names and not all(name.endswith(DATA_SUFFIX) for name in names)

    def _warn_once(self, path: Path, text: str, *arguments: object) -> None:
        if path.name not in self._warned_of:
            self._warned_of.add(path.name)
            logger.warning("%s " + text, path, *arguments)

    def _put_back(self, replaced: Path, final: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._remove(final)
        os.rename(replaced, final)
        sync_directory(self.root)

    def _replace(self, incomplete: Path, final: Path) -> None:
        if _exchange(incomplete, final):
            sync_directory(self.root)
            self._remove_in_time(incomplete)
            return
        replaced = final.with_name(final.name + ".replaced")
        if os.path.lexists(replaced):
            self._remove(replaced)
        os.rename(final, replaced)
        os.rename(incomplete, final)
        sync_directory(self.root)
        self._remove_in_time(replaced)

    def _remove_in_time(self, path: Path) -> None:
        """Delete a directory that is not needed any more. If that fails, only log a warning."""
        try:
            self._remove(path)
        except OSError as error:
            self._warn_once(path, "could not be deleted yet: %s", error)

    def _remove(self, path: Path) -> None:
        """Rename a directory and delete it, so that a partly deleted directory never counts as complete."""
        _delete(path if ".deleted" in path.name else self._without_name(path))

    def _without_name(self, path: Path) -> Path:
        base = path.name.split(".")[0]
        number = 0
        deleted = self.root / f"{base}.deleted"
        while os.path.lexists(deleted):
            number += 1
            deleted = self.root / f"{base}.deleted-{number}"
        os.rename(path, deleted)
        sync_directory(self.root)
        return deleted


def _delete(path: Path) -> None:
    """Delete a directory with its content, or a file. If the path is a link, delete only the link."""
    if is_directory(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def wait_until_visible(path: Path, check: Callable[[], None]) -> None:
    """Wait until this host sees a path that another host has created on a shared file system.

    Args:
        path: The path to wait for.
        check: Called repeatedly while waiting; an error that it raises ends the wait.

    Raises:
        FileNotFoundError: The path did not become visible within 30 s.
    """
    deadline_s = time.monotonic() + _VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise FileNotFoundError(
                errno.ENOENT,
                "expected a path that rank 0 has created to be visible on this host; all ranks must share the file "
                "system",
                str(path),
            )
        # Listing the parents refreshes entries that a network file system has cached.
        for parent in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(parent)
        check()
        time.sleep(_LOOK_S)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one system call. Return ``False`` if the system or the file system cannot do that."""
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
