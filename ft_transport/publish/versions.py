"""The directory of versions: each is written once, under a name of its own, and never changed again.

One rank alone calls what is here. A version is written to ``version-N.incomplete``; when all its files are on disk, one
rename makes it ``version-N``. So an engine never reads what is still being written, and never what replaces it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.directory import sync_directory
from ft_transport.errors import StaleVersionError
from ft_transport.publish.naming import directory_name, version_in

_INCOMPLETE: Final = ".incomplete"
_DELETED: Final = ".deleted"


class VersionDirectory:
    """The versions under one root. Not thread-safe, but for `remove_unused`, which another thread may call.

    Args:
        root: Where they are; it exists.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def recover(self) -> None:
        """Clears what an interrupted run has left."""
        for path in self._root.iterdir():
            base = path.name.removesuffix(_INCOMPLETE).removesuffix(_DELETED)
            if base != path.name and version_in(base) is not None and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)

    def versions(self) -> list[int]:
        """All complete ones, ascending."""
        found = (version_in(name) for name in os.listdir(self._root))
        return sorted(version for version in found if version is not None)

    def path_of(self, version: int) -> Path:
        """Where a complete version is."""
        return self._root / directory_name(version)

    def begin(self, version: int) -> Path:
        """Makes the directory that a version is written to.

        Raises:
            StaleVersionError: It is not newer than all that there are.
        """
        versions = self.versions()
        if versions and version <= versions[-1]:
            raise StaleVersionError(
                f"expected a version after {versions[-1]}, which was published to {self._root} before, got {version}"
            )
        path = self._root / (directory_name(version) + _INCOMPLETE)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
        path.mkdir()
        return path

    def commit(self, version: int) -> Path:
        """Makes what was written, and is on disk file by file, the version. Returns its directory."""
        incomplete, final = self._root / (directory_name(version) + _INCOMPLETE), self.path_of(version)
        for path in incomplete.iterdir():
            path.chmod(0o444)
        sync_directory(incomplete)
        os.rename(incomplete, final)
        sync_directory(self._root)
        return final

    def discard(self, version: int) -> None:
        """Removes what was written of a version that will not be complete."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / (directory_name(version) + _INCOMPLETE))

    def remove_unused(self, used: Set[int]) -> list[int]:
        """Deletes versions that no engine uses; never the newest, by which the next is known to be newer.

        Args:
            used: Versions that engines use, or are being told of.

        Returns:
            Those that were deleted.
        """
        removed = [version for version in self.versions()[:-1] if version not in used]
        for version in removed:
            path = self.path_of(version)
            deleted = path.with_name(path.name + _DELETED)
            # It loses its name first, so that nobody takes what is left for a whole.
            os.rename(path, deleted)
            shutil.rmtree(deleted)
        return removed
