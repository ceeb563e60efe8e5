"""Copies of the versions in a `DeltaDirectory` in a bucket: the publisher pushes them, an engine's host pulls them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.copying import copy_files
from ft_transport.checkpoint.digested_file import DigestedFile
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.files import CheckpointFiles, DirectoryFiles, files_at
from ft_transport.checkpoint.manifest import (
    FORMAT_VERSIONS,
    CheckpointManifest,
    encode_manifest,
    is_file_name,
)
from ft_transport.checkpoint.roots import draw_attempt, root_at
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.stored_files import ReadRetries, read_file, read_manifest
from ft_transport.errors import CheckpointError, CheckpointUntrustedError, EngineRefusedError, RestoreError
from ft_transport.publish.deltas import DELTA_NAME, DIGESTS_NAME, MAX_DIGESTS_BYTES, decode_digests, digests_in
from ft_transport.runtime.regular_files import make_directory

_PIECE_BYTES: Final = 8 << 20
_COPY_PREFIX: Final = ".pulled-"


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
        self._pushed: set[int] | None = None
        self.url = self._root.name

    def versions(self) -> list[int]:
        """Return the numbers of all versions, ascending. Raises an ``OSError`` if the bucket cannot be read."""
        return self._root.numbers()

    @property
    def name(self) -> str:
        """The URL (`VersionSource`)."""
        return self.url

    def check_names(self, names: Iterable[str]) -> None:
        """Raise an error if a bucket cannot have a file of this name.

        Raises:
            EngineRefusedError: A name is not usable.
        """
        for name in names:
            if not is_file_name(name):
                raise EngineRefusedError(
                    f"expected file names of letters, digits and ._- in {self.url}, got {name!r}", peer=self.url
                )

    def push(self, directory: NumberedDirectory) -> None:
        """Copy the versions that the bucket lacks, and delete those that the directory has deleted.

        Raises:
            EngineRefusedError: Another publisher has written to this prefix.
            CheckpointInUseError: Another publisher pushes to this prefix at present.
            OSError: A file cannot be read, or the bucket cannot be written.
        """
        root = self._root
        try:
            root.claim("a publisher of deltas", 0)
            if self._pushed is None:
                root.recover()
            there, numbers = root.numbers(), directory.numbers()
            old = self._old(there, directory)
            self._pushed = {*self._pushed, *there} if self._pushed is not None else {*there}
            for number in numbers:
                path = directory.find(number)
                if number not in there and path is not None:
                    self._push(number, path)
                    self._pushed.add(number)
            # The newest first: each delta that is left has its anchor, also if this is interrupted.
            root.delete([each for number in reversed(old) for each in root.retire(number)])
        finally:
            root.release()

    def _old(self, there: Sequence[int], directory: NumberedDirectory) -> list[int]:
        """Return the versions in the bucket that precede those in the directory.

        A publisher that restarts with an empty directory continues a prefix if its versions have higher numbers.

        Raises:
            EngineRefusedError: A version in the bucket was written by another publisher, which may still run, or whose
                versions this directory's would replace.
        """
        numbers = directory.numbers()
        old = [number for number in there if not numbers or number < numbers[0]]
        for number in there:
            is_known = self._pushed is not None and number in self._pushed
            is_of_lost_directory = self._pushed is None and number in old
            if not is_known and not is_of_lost_directory and not self._has(number, directory):
                raise EngineRefusedError(
                    f"expected only versions of {directory.root} in {self.url}, got version {number} of another run; "
                    "use another prefix",
                    peer=self.url,
                )
        return old

    def _has(self, number: int, directory: NumberedDirectory) -> bool:
        """Return whether the bucket has a version of a directory."""
        path = directory.find(number)
        try:
            return path is not None and self.digests(number) == digests_in(path)
        except CheckpointUntrustedError:
            return False

    def digests(self, version: int) -> dict[str, int]:
        """Return the digest of each file of a version. Raises the errors of `opened`."""
        retries = ReadRetries(self._settings.retry_s)
        files, manifest = self._found(version, retries)
        entry = next((each for each in manifest.files if each.name == DIGESTS_NAME), None)
        if entry is None or entry.num_bytes > MAX_DIGESTS_BYTES:
            raise RestoreError(
                f"expected a record of digests of at most {MAX_DIGESTS_BYTES} bytes for version {version} in "
                f"{self.url}, got {'none' if entry is None else f'{entry.num_bytes} bytes'}"
            )
        where = f"{self.url}, version {version}"
        return decode_digests(read_file(files, entry, manifest.hash, retries), where)

    @contextmanager
    def opened(self, wanted: int, have: Collection[int], parent: Path) -> Iterator[NumberedDirectory]:
        """Copy a version, and all versions on which its delta depends, to a directory that lasts until the block ends.

        Args:
            wanted: Number of the version.
            have: Whole versions that the caller has: earlier ones are not copied.
            parent: Where the directory is made. The caller has claimed it: leftovers of killed processes are deleted.

        Raises:
            RestoreError: The bucket does not have the version.
            CheckpointDamagedError: A file differs from its digests.
            CheckpointUntrustedError: The version has no valid signature with the job token.
            OSError: The bucket cannot be read.
        """
        for leftover in parent.glob(f"{_COPY_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_COPY_PREFIX, dir=parent) as into:
            self._pull(wanted, have, Path(into))
            yield NumberedDirectory(Path(into), "version", None)

    def _pull(self, wanted: int, have: Collection[int], into: Path) -> None:
        numbers = [number for number in self.versions() if number <= wanted]
        for number in reversed(numbers):
            if number in have:
                return
            path = into / f"version-{number}"
            make_directory(path)
            retries = ReadRetries(self._settings.retry_s)
            files, manifest = self._found(number, retries)
            copy_files(files, DirectoryFiles(path), manifest, retries, is_copied=lambda _: True)
            if all(entry.name != DELTA_NAME for entry in manifest.files):
                return

    def _found(self, version: int, retries: ReadRetries) -> tuple[CheckpointFiles, CheckpointManifest]:
        location = self._root.find(version)
        if location is None:
            raise RestoreError(f"expected version {version} in {self.url}, but it was deleted")
        files = files_at(location)
        return files, read_manifest(files, version, self._trust, retries)

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
            with contextlib.suppress(OSError, CheckpointError):  # `recover` deletes what is left
                root.discard(number)
            raise


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
