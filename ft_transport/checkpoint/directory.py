"""Numbered directories, ``step-N`` or ``version-N``: which names count, and how they change so that no crash costs one.

One rank alone calls what is here. Files are written to ``step-N.incomplete``; when all of them are on disk, one rename
makes it ``step-N``. So a directory of that name is complete at any instant. One that is replaced is exchanged with its
successor by one system call where the file system can do that. Where it cannot (NFS), it becomes ``step-N.replaced``
first, which counts as ``step-N`` as long as there is no other. What is deleted gets the name ``step-N.deleted`` first.

A ``step-N`` that another program wrote is foreign: it does not count, and nothing here replaces or deletes it.
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
_LOOK_S: Final = 0.02
_MAX_DIGITS: Final = 18
MAX_NUMBER: Final = 10**_MAX_DIGITS - 1
"""What has more digits is none of these directories: no step is so large, and no message could carry it."""


class NumberedDirectory:
    """The numbered directories under one root. Two threads may work on different numbers at once.

    Args:
        root: Where they are; made if it is not there.
        prefix: What their names begin with, such as ``step``.
        last_file: Name of the file that is written last: a directory without it is not complete, whatever its name.
            ``None``: the name alone says that it is. A checkpoint may be reached by a link, a version may not, which is
            copied from.
        is_private: Whether nobody but the owner may read what is made here; else the umask says who may.

    Attributes:
        root: The same.
        prefix: The same.
    """

    def __init__(self, root: Path, prefix: str, last_file: str | None, *, is_private: bool = False) -> None:
        self.root = root
        self.prefix = prefix
        self._last_file = last_file
        self._is_private = is_private
        self._pattern = re.compile(rf"{prefix}-(0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}}){_SUFFIXES}")
        self._warned_of: set[str] = set()

    def recover(self) -> None:
        """Clears what an interrupted run has left, and puts back what it was about to replace.

        What cannot be deleted, as what another user has put there, is passed by with a warning.
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
                self._warn_once(path, "could not be deleted, and does not count: %s", error)

    # ------------------------------------------------------------------------------------------------------- what is

    def numbers(self) -> list[int]:
        """The numbers of all complete directories, ascending."""
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
                    self._warn_once(path, "has no %s and does not count", self._last_file)
        return sorted(found)

    def find(self, number: int) -> Path | None:
        """A complete directory; ``None`` if there is none of this number."""
        paths = (self._path(number), self._path(number, ".replaced"))
        return next((path for path in paths if self._is_complete(path)), None)

    def foreign(self) -> dict[int, Path]:
        """Directories of these names that another program wrote, by number, ascending."""
        found = {number: path for path, number, suffix in self._found() if not suffix and self._is_foreign(path)}
        return dict(sorted(found.items()))

    def refuse_foreign(self, number: int) -> None:
        """Refuses to replace what another program wrote.

        Raises:
            CheckpointExistsError: A foreign directory has the name of this number.
        """
        path = self._path(number)
        if self._is_foreign(path):
            raise CheckpointExistsError(
                f"expected no other program's files in {path}: no save replaces them; move that directory away, or "
                "save to another root",
                step=number,
            )

    # -------------------------------------------------------------------------------------------------------- writing

    def begin(self, number: int) -> Path:
        """Makes the directory that the files of a number are written to, empty, and returns it."""
        make_directory(self.root, is_private=self._is_private, is_ok_if_there=True)
        path = self.incomplete(number)
        if os.path.lexists(path):
            # Another one takes its name; what cannot be deleted of it is no reason not to write.
            self._delete_in_time(self._without_name(path))
        make_directory(path, is_private=self._is_private)
        return path

    def incomplete(self, number: int) -> Path:
        """Where `begin` makes the directory of a number."""
        return self._path(number, ".incomplete")

    def final(self, number: int) -> Path:
        """What `commit` makes of it."""
        return self._path(number)

    def commit(self, number: int) -> Path:
        """Makes what was written, and is on disk file by file, the directory of its number. Returns that."""
        incomplete, final = self.incomplete(number), self.final(number)
        sync_directory(incomplete)
        if os.path.lexists(final):
            self._replace(incomplete, final)
        else:
            os.rename(incomplete, final)
            sync_directory(self.root)
        return final

    def discard(self, number: int) -> None:
        """Removes what was written of a directory that will not be complete."""
        with contextlib.suppress(FileNotFoundError):
            self._remove(self.incomplete(number))

    def retire(self, number: int) -> list[Path]:
        """Takes a directory out of those that count.

        Returns:
            What is left to `delete`.
        """
        retired = []
        for path in (self._path(number), self._path(number, ".replaced")):
            with contextlib.suppress(FileNotFoundError):
                retired.append(self._without_name(path))
        return retired

    @staticmethod
    def delete(retired: Sequence[Path]) -> None:
        """Deletes what `retire` has left. On any thread."""
        for path in retired:
            with contextlib.suppress(FileNotFoundError):
                _delete(path)

    def clear(self) -> None:
        """Takes all of them out of those that count, and deletes them, complete or not, but for foreign ones.

        Raises:
            OSError: One still counts.
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
                self._warn_once(path, "could not be deleted, and does not count: %s", error)

    # --------------------------------------------------------------------------------------------------------- inside

    def _path(self, number: int, suffix: str = "") -> Path:
        return self.root / f"{self.prefix}-{number}{suffix}"

    def _found(self) -> list[tuple[Path, int, str]]:
        """Path, number and suffix of what is here and looks like ours."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        matches = [(name, self._pattern.fullmatch(name)) for name in sorted(names)]
        return [(self.root / name, int(match[1]), match[2] or "") for name, match in matches if match is not None]

    def _is_complete(self, path: Path) -> bool:
        if self._last_file is None:
            return is_directory(path, follows_links=False)
        return is_regular(path / self._last_file)

    def _is_foreign(self, path: Path) -> bool:
        """Whether another program wrote the directory, the file or the link at this path.

        Own files that lost their list are not foreign, nor are data files without the metadata of DCP, which an
        interrupted ``dcp.save`` leaves.
        """
        if self._last_file is None or self._is_complete(path):
            return False
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return False
        except OSError:  # a file, or a directory of another user
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
        """Deletes what has a successor; whatever hinders it, the successor is complete."""
        try:
            self._remove(path)
        except OSError as error:
            logger.warning("%s could not be deleted yet: %s", path, error)

    def _delete_in_time(self, path: Path) -> None:
        try:
            _delete(path)
        except OSError as error:
            self._warn_once(path, "could not be deleted yet: %s", error)

    def _remove(self, path: Path) -> None:
        """Deletes a directory; it loses its name first, so that what is left is not taken for a whole."""
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
    """Deletes a directory, or whatever else has the name of one; of a link nothing but the link."""
    if is_directory(path, follows_links=False):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def wait_until_visible(path: Path, timeout_s: float, check: Callable[[], None]) -> None:
    """Waits for what another host has made: a shared file system may take a moment to show it.

    Args:
        path: What it has made.
        timeout_s: How long it may take.
        check: Called now and then; what it raises ends the waiting.

    Raises:
        FileNotFoundError: It is not visible here in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise FileNotFoundError(
                errno.ENOENT,
                "what rank 0 has made is not visible here; expected a file system that all ranks share",
                str(path),
            )
        # The listings of the directories above may be remembered ones.
        for parent in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(parent)
        check()
        time.sleep(_LOOK_S)


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
