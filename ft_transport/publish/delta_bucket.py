"""Copies of the versions in a `DeltaDirectory` in a bucket: the publisher pushes them, an engine's host pulls them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.copying import copy_files
from ft_transport.checkpoint.digested_file import DigestedFile
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.files import DirectoryFiles, files_at
from ft_transport.checkpoint.manifest import FORMAT_VERSIONS, CheckpointManifest, FileEntry, encode_manifest
from ft_transport.checkpoint.roots import draw_attempt, root_at
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.stored_files import ReadRetries, read_manifest
from ft_transport.errors import RestoreError
from ft_transport.publish.deltas import DELTA_NAME, DIGESTS_NAME, digests_in
from ft_transport.runtime.regular_files import make_directory

_PIECE_BYTES: Final = 8 << 20


class DeltaBucket:
    """The versions under a prefix in a bucket. Not thread-safe.

    With a job token in the environment, the publisher signs the versions, and an engine's host loads only signed ones.

    Args:
        url: URL of the prefix, such as ``s3://bucket/deltas``.

    Attributes:
        url: The URL.

    Raises:
        ConfigurationError: The URL, the job token or the environment's settings are invalid.
    """

    def __init__(self, url: str) -> None:
        self._root = root_at(url, "version")
        self._settings = StoreSettings()
        self._trust = self._settings.trust()
        self._is_clean = False
        self.url = self._root.name

    def versions(self) -> list[int]:
        """Return the numbers of all versions, ascending. Raises an ``OSError`` if the bucket cannot be read."""
        return self._root.numbers()

    def push(self, directory: NumberedDirectory) -> None:
        """Copy the versions that the bucket lacks, and delete those that the directory lacks.

        Raises:
            CheckpointInUseError: Another publisher pushes to this prefix.
            OSError: A file cannot be read, or the bucket cannot be written.
        """
        root, numbers = self._root, directory.numbers()
        root.claim("a publisher of deltas", 0)
        try:
            if not self._is_clean:
                root.recover()
                self._is_clean = True
            there = root.numbers()
            for number in numbers:
                path = directory.find(number)
                if number not in there and path is not None:
                    self._push(number, path)
            root.delete([each for number in there if number not in numbers for each in root.retire(number)])
        finally:
            root.release()

    def digests(self, version: int) -> dict[str, int]:
        """Return the digest of each file of a version. Raises the errors of `pulled`."""
        with tempfile.TemporaryDirectory(prefix="ft-transport-") as into:
            self._copy(version, Path(into), is_copied=lambda entry: entry.name == DIGESTS_NAME)
            return digests_in(Path(into))

    @contextmanager
    def pulled(self, wanted: int, have: Collection[int], parent: Path) -> Iterator[Path]:
        """Copy a version, and all versions on which its delta depends, to a directory that lasts until the block ends.

        Args:
            wanted: Number of the version.
            have: Whole versions that the caller has: earlier ones are not copied.
            parent: Where the directory is made.

        Raises:
            RestoreError: The bucket does not have the version.
            CheckpointDamagedError: A file differs from its digests.
            CheckpointUntrustedError: The version has no valid signature with the job token.
            OSError: The bucket cannot be read.
        """
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pulled-", dir=parent) as into:
            self._pull(wanted, have, Path(into))
            yield Path(into)

    def _pull(self, wanted: int, have: Collection[int], into: Path) -> None:
        numbers = self.versions()
        if wanted not in numbers:
            raise RestoreError(f"expected version {wanted} in {self.url}, which has {numbers or 'none'}")
        for number in reversed(numbers[: numbers.index(wanted) + 1]):
            if number in have:
                return
            path = into / f"version-{number}"
            make_directory(path)
            if DELTA_NAME not in self._copy(number, path, is_copied=lambda _: True):
                return

    def _copy(self, version: int, into: Path, is_copied: Callable[[FileEntry], bool]) -> set[str]:
        """Copy files of a version to a directory. Return the names of all its files."""
        retries = ReadRetries(self._settings.retry_s)
        location = self._root.find(version)
        if location is None:
            raise RestoreError(f"expected version {version} in {self.url}, but it was deleted")
        files = files_at(location)
        manifest = read_manifest(files, version, self._trust, retries)
        copy_files(files, DirectoryFiles(into), manifest, retries, is_copied=is_copied)
        return {entry.name for entry in manifest.files}

    def _push(self, number: int, path: Path) -> None:
        root, trust = self._root, self._trust
        attempt = draw_attempt()
        root.begin(number, attempt)
        try:
            files = files_at(root.attempt(number, attempt))
            entries = []
            for source in sorted(path.iterdir()):
                with DigestedFile(files, source.name, hash_name=trust.hash_name) as file:
                    for piece in _pieces(source):
                        file.write(piece)
                    entries.append(file.finish())
            manifest = CheckpointManifest(
                format=FORMAT_VERSIONS[trust.hash_name],
                step=number,
                num_ranks=1,
                local_keys=(),
                files=tuple(entries),
                hash=trust.hash_name,
                job=trust.job if trust.keys is not None else "",
            )
            root.commit(number, attempt, trust.seal(encode_manifest(manifest)))
        except BaseException:
            root.discard(number)
            raise


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
