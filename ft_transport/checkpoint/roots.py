"""The root of numbered checkpoints or versions: a directory, or a prefix in a bucket.

`DirectoryRoot` wraps the numbered directories (``directory``) and their lock (``claim``); `BucketRoot` is in
``bucket_root``. Both follow `CheckpointRoot`, and have the same tests (``tests/unit/checkpoint/test_roots.py``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory, wait_until_visible
from ft_transport.checkpoint.files import is_url
from ft_transport.checkpoint.manifest import MANIFEST_NAME
from ft_transport.errors import ConfigurationError
from ft_transport.runtime.regular_files import UnusableFileError, create_file, open_regular

_ATTEMPT_BITS: Final = 63
"""The ranks exchange the number of an attempt as a signed integer of 64 bits."""


class CheckpointRoot(Protocol):
    """The checkpoints of one root. Two threads may work on different numbers at the same time.

    A checkpoint is written in an attempt: `begin`, files at the location `attempt`, `commit`. It is listed from the
    commit on. Only the process that has claimed the root may call `recover`, `begin`, `commit`, `discard`, `retire`,
    `delete` and `clear`. All methods may raise an ``OSError``.

    Attributes:
        name: The path of the directory, or the URL, for messages.
    """

    name: str

    def claim(self, owner: str, timeout_s: float) -> None:
        """Claims the root for this process, until `release` or the end of the process.

        Raises:
            CheckpointInUseError: Another process has claimed the root, and did not release it within ``timeout_s``.
        """

    def release(self) -> None:
        """Ends the claim. Idempotent."""

    def recover(self) -> None:
        """Deletes the leftovers of an interrupted run, and completes a replacement that the run had begun."""

    def numbers(self) -> list[int]:
        """Returns the numbers of all complete checkpoints, ascending."""

    def find(self, number: int) -> str | None:
        """Returns the location of a complete checkpoint; ``None`` if it is missing or incomplete."""

    def identity(self, location: str) -> str | None:
        """Returns a text that differs after the checkpoint was replaced; ``None`` if the checkpoint does not exist."""

    def foreign(self) -> dict[int, Path]:
        """Returns the directories named like checkpoints that another program wrote, by number, ascending."""

    def refuse_foreign(self, number: int) -> None:
        """Raises an error if another program wrote the directory of this number.

        Raises:
            CheckpointExistsError: Another program wrote the directory.
        """

    def begin(self, number: int, attempt: int) -> None:
        """Begins an attempt with a random number, by which the other ranks recognise it."""

    def attempt(self, number: int, attempt: int) -> str:
        """Returns the location of an attempt."""

    def wait_for(self, number: int, attempt: int, check: Callable[[], None]) -> None:
        """Waits until this host sees an attempt that the first rank has begun. ``check`` raises to end the wait."""

    def commit(self, number: int, attempt: int, encoded: bytes | None) -> None:
        """Makes an attempt visible as the checkpoint of its number. An earlier one is replaced.

        Args:
            number: Number of the checkpoint.
            attempt: Number of the attempt, all of whose files are stored.
            encoded: Content of the list of files; ``None`` in a root without lists.
        """

    def final(self, number: int, attempt: int) -> str:
        """Returns the location of an attempt after its commit."""

    def discard(self, number: int) -> None:
        """Deletes the files of a failed attempt."""

    def retire(self, number: int) -> list[str]:
        """Removes a checkpoint from the listed ones. Returns what is left of it, for `delete`."""

    def delete(self, retired: Sequence[str]) -> None:
        """Deletes what `retire` has returned, except files that other checkpoints share."""

    def clear(self) -> None:
        """Deletes all checkpoints, complete or not, except those that another program wrote."""


def draw_attempt() -> int:
    """Return a random number for an attempt (`CheckpointRoot.begin`)."""
    return secrets.randbits(_ATTEMPT_BITS)


def root_at(root: Path | str, prefix: str, *, is_private: bool = False) -> CheckpointRoot:
    """Return the root of checkpoints with lists of files.

    Args:
        root: The path of a directory, or the URL of a prefix in a bucket.
        prefix: The text before the hyphen in the names, such as ``step``.
        is_private: Whether only the owner may read new directories and files. Otherwise the umask decides.

    Raises:
        ConfigurationError: The library ``obstore`` is not installed, or does not know the URL.
    """
    if is_url(str(root)):
        try:
            # Imports obstore, which is an extra.
            from ft_transport.checkpoint.bucket_root import BucketRoot  # noqa: PLC0415
        except ModuleNotFoundError as error:
            if error.name != "obstore":
                raise
            raise ConfigurationError(
                f"expected the library obstore for {root}; install it with: pip install 'ft-transport[bucket]'"
            ) from error
        return BucketRoot(str(root), prefix)
    return DirectoryRoot(NumberedDirectory(Path(root), prefix, MANIFEST_NAME, is_private=is_private))


class DirectoryRoot:
    """A directory with numbered directories (`CheckpointRoot`).

    Args:
        directories: The numbered directories.
    """

    def __init__(self, directories: NumberedDirectory) -> None:
        self.name = str(directories.root)
        self._directories = directories
        self._claim = RootClaim(directories.root, is_private=directories.is_private)
        self.claim, self.release = self._claim.take, self._claim.release
        self.recover, self.numbers, self.clear = directories.recover, directories.numbers, directories.clear
        self.foreign, self.refuse_foreign = directories.foreign, directories.refuse_foreign
        self.discard = directories.discard

    def find(self, number: int) -> str | None:
        """Return the path of a complete checkpoint."""
        path = self._directories.find(number)
        return str(path) if path is not None else None

    def identity(self, location: str) -> str | None:
        """Return inode and modification time of the list of files; ``None`` if the list does not exist."""
        try:
            # A network file system may answer stat from its cache, but not open.
            with os.fdopen(open_regular(Path(location) / MANIFEST_NAME), "rb") as file:
                status = os.fstat(file.fileno())
        except (FileNotFoundError, NotADirectoryError, UnusableFileError):
            return None
        return f"{status.st_ino} {status.st_mtime_ns}"

    def begin(self, number: int, attempt: int) -> None:
        """Create an empty directory, and in it an empty file whose name has the number of the attempt."""
        os.close(create_file(self._directories.begin(number) / _marker_name(attempt)))

    def attempt(self, number: int, attempt: int) -> str:  # noqa: ARG002 # one directory for all attempts
        """Return the path of the incomplete directory, which is the same for all attempts."""
        return str(self._directories.incomplete(number))

    def wait_for(self, number: int, attempt: int, check: Callable[[], None]) -> None:
        """Wait until this host sees the attempt's directory."""
        wait_until_visible(self._directories.incomplete(number) / _marker_name(attempt), check)

    def commit(self, number: int, attempt: int, encoded: bytes | None) -> None:
        """Write the list of files, flush the directory, rename it, and flush the rename."""
        path = self._directories.incomplete(number)
        if encoded is not None:
            write_small(path, MANIFEST_NAME, encoded, is_private=self._directories.is_private)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / _marker_name(attempt))
        self._directories.commit(number)

    def final(self, number: int, attempt: int) -> str:  # noqa: ARG002 # the name has only the number
        """Return the path of the complete directory."""
        return str(self._directories.final(number))

    def retire(self, number: int) -> list[str]:
        """Rename the directory, and return its new path."""
        return [str(path) for path in self._directories.retire(number)]

    def delete(self, retired: Sequence[str]) -> None:
        """Delete directories that `retire` has renamed."""
        self._directories.delete([Path(path) for path in retired])


def _marker_name(attempt: int) -> str:
    return f".set-up-{attempt:016x}"
