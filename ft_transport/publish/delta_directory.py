"""The `DeltaDirectory`: versions as small files, for engines that share only a slow disk or a bucket with the trainer.

Each version is a subdirectory ``version-N``. An anchor has all files of its version; any other subdirectory has a delta
from an earlier version. The publisher treats the directory as an engine: a delivery has a deadline, is repeated after a
failure, and may skip versions while an earlier delivery runs. On the engine's host, `DeltaDirectory.restore` writes
whole versions to a local disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.files import is_url
from ft_transport.errors import (
    CheckpointError,
    CheckpointInUseError,
    ConfigurationError,
    EngineRefusedError,
    EngineUnreachableError,
    ManifestError,
    RestoreError,
)
from ft_transport.publish.delta_bucket import DeltaBucket
from ft_transport.publish.deltas import (
    DELTA_NAME,
    DIGESTS_NAME,
    SAFETENSORS,
    copy_file,
    decode_limit,
    delta_between,
    digests_in,
    digests_of,
    encode_digests,
    headers_of,
    num_bytes_of,
)
from ft_transport.publish.engines.engine import Delivery, EngineConnection, in_daemon_thread
from ft_transport.publish.version_restore import VersionSource, delta_file, restore_version
from ft_transport.publish.versions import weights_in
from ft_transport.runtime.threads import at_exit
from ft_transport.settings import check_duration, check_number
from ft_transport.wire.delta import decode_delta

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Errors with which file systems without locks, such as mounted buckets, refuse a lock."""
_THREAD_NAME: Final = "ft-transport-deltas"
_EXIT_S: Final = 10.0
"""Seconds that an exiting process waits for running writes."""


class DeltaDirectory:
    """A directory to which a `Publisher` delivers versions, most of them as deltas. Readers restore whole versions.

    Args:
        root: The directory. Only one publisher at a time can write there. On the host of an engine also the URL of a
            bucket, from which `restore` copies what it needs.
        anchor_every: At least one of so many versions in a row is an anchor, which does not depend on other versions.
        keep_anchors: Number of newest anchors to keep. Versions older than these anchors are deleted.
        private: Whether only the owner may read the files and directories, including restored ones. By default the
            umask applies.
        bucket: The URL of a bucket and a prefix in it, such as ``s3://bucket/deltas``, to which each version is copied.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    headers: Mapping[str, str] = {}
    adapter_features: frozenset[str] | None = None
    """``None``: every adapter may be published here, because the directory has all of PEFT's files unchanged."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        anchor_every: int = 10,
        keep_anchors: int = 2,
        private: bool = False,
        bucket: str | None = None,
    ) -> None:
        self._anchor_every = check_number("anchor_every", anchor_every, at_least=1)
        self._keep_anchors = check_number("keep_anchors", keep_anchors, at_least=1)
        self._is_remote = is_url(os.fspath(root))
        if self._is_remote and bucket is not None:
            raise ConfigurationError(f"expected a directory as root beside bucket={bucket!r}, got {root!r}")
        url = os.fspath(root) if self._is_remote else bucket
        self._bucket = DeltaBucket(url) if url is not None else None
        self._directory = NumberedDirectory(Path(root).absolute(), "version", None, is_private=private)
        self._is_private = private
        self._mutex = threading.Lock()
        self.url = self._bucket.url if self._is_remote and self._bucket is not None else self._directory.root.as_uri()

    def versions(self) -> list[int]:
        """Return the numbers of all versions in the directory or bucket, ascending."""
        if self._is_remote and self._bucket is not None:
            return self._bucket.versions()
        return self._directory.numbers()

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Write a version to the directory, as a delta if that is smaller (`Engine.deliver`)."""
        del connection
        if self._is_remote:
            raise EngineRefusedError(
                f"expected a local directory to publish to, got {self.url}; pass it as bucket=", peer=self.url
            )
        # Own threads: a directory that hangs must not block the pool of threads that serves other engines.
        while (version := await in_daemon_thread(_THREAD_NAME, self._write_in_turn, delivery)) is None:
            await asyncio.sleep(0.05)
        return version

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """Return the newest version in the directory (`PolledEngine.served_version`)."""
        del connection, newest
        return await in_daemon_thread(_THREAD_NAME, self._newest)

    def restore(
        self,
        directory: str | os.PathLike[str],
        version: int | None = None,
        *,
        keep: int = 2,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Path:
        """Restore a whole version on a local disk by applying deltas to an earlier local version or to an anchor.

        Args:
            directory: Local directory for whole versions; created if it does not exist. If several processes restore to
                this directory at once, one process does the work and the others wait.
            version: Number of the version to restore. Default: the newest.
            keep: Number of newest local versions to keep. The returned version is never deleted.
            timeout: Longest wait for other processes that restore to ``directory``. It does not limit the copying.
                A request to a bucket ends after at most two minutes.

        Returns:
            The local directory of the version, from which ``from_pretrained`` or an engine can load it. All files are
            on disk.

        Raises:
            RestoreError: The version, or a delta that it depends on, is missing.
            IntegrityError: A restored file differs from the file of the version.
            CheckpointDamagedError: A file in the bucket differs from its digests.
            CheckpointUntrustedError: The version in the bucket has no valid signature with the job token.
            CheckpointInUseError: Another process still restored to ``directory`` when ``timeout`` had passed.
            OSError: A file cannot be read or written.
        """
        keep = check_number("keep", keep, at_least=1)
        check_duration("timeout", timeout, at_least=timedelta(0))
        local = NumberedDirectory(Path(directory), "version", None, is_private=self._is_private)
        source: VersionSource = _Versions(self._directory)
        if self._is_remote and self._bucket is not None:
            source = self._bucket
        return restore_version(source, local, version, keep=keep, timeout_s=timeout.total_seconds())

    # ------------------------------------------------------------------------------------------------------- writing

    def _write_in_turn(self, delivery: Delivery) -> int | None:
        """Write a version; return ``None`` if another thread is writing one."""
        if not self._mutex.acquire(blocking=False):
            return None
        try:
            with self._claimed():
                version = self._write(delivery)
                self._push()
                return version
        finally:
            self._mutex.release()

    def _push(self) -> None:
        """Copy the versions to the bucket; also those that an earlier push could not copy."""
        if self._bucket is None:
            return
        try:
            self._bucket.push(self._directory)
        except (OSError, CheckpointError, RestoreError) as error:
            raise EngineUnreachableError(
                f"the versions could not be copied to {self._bucket.url}: {error}", peer=self.url
            ) from error

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Lock the directory against other publishers, if its file system has locks."""
        claim = RootClaim(self._directory.root, is_private=self._is_private)
        try:
            try:
                claim.take("a publisher of deltas", 0)
            except CheckpointInUseError as error:
                raise EngineUnreachableError(error.message, peer=self.url) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            yield
        finally:
            claim.release()

    def _newest(self) -> int | None:
        if not self._mutex.acquire(blocking=False):
            raise EngineUnreachableError(
                f"cannot list the versions in {self._directory.root} while a version is being written", peer=self.url
            )
        try:
            return max(self.versions(), default=None)
        finally:
            self._mutex.release()

    def _write(self, delivery: Delivery) -> int:
        self._directory.recover()
        versions = self.versions()
        digests = digests_of(delivery.directory)
        if self._bucket is not None:
            self._bucket.check_names(digests)
        if (there := self._directory.find(delivery.version)) is not None:
            if digests_in(there) == digests:
                return delivery.version
            raise EngineRefusedError(
                f"expected only versions of this run in {self._directory.root}, got a version {delivery.version} with "
                "other files; use another directory",
                peer=self.url,
            )
        if versions and delivery.version < versions[-1]:
            raise EngineRefusedError(
                f"expected a version after {versions[-1]}, the newest in {self._directory.root}, got "
                f"{delivery.version}",
                peer=self.url,
            )
        path = self._directory.begin(delivery.version)
        try:
            delta = self._delta_to(delivery, versions)
            for source in sorted(delivery.directory.iterdir()):
                if delta is None or source.suffix != SAFETENSORS:
                    copy_file(source, path / source.name, is_private=self._is_private)
            if delta is not None:
                write_small(path, DELTA_NAME, delta, is_private=self._is_private)
            write_small(path, DIGESTS_NAME, encode_digests(digests), is_private=self._is_private)
            self._directory.commit(delivery.version)
        except BaseException:
            # Frees the space of the failed version, because the disk may be full.
            with contextlib.suppress(OSError):
                self._directory.discard(delivery.version)
            raise
        try:
            self._delete_old()
        except OSError as error:
            logger.warning("could not delete old versions in %s: %s", self._directory.root, error)
        return delivery.version

    def _delta_to(self, delivery: Delivery, versions: Sequence[int]) -> bytes | None:
        base = versions[-1] if versions else None
        recent = versions[max(0, len(versions) - self._anchor_every + 1) :]
        if base is None or all(delta_file(self._directory, each) is not None for each in recent):
            return None
        directory = delivery.directory.parent / f"version-{base}"
        there = self._directory.find(base)
        try:
            # A delta has only the values of tensors, so both versions must have files of the same layout.
            if there is None or headers_of(directory) != headers_of(delivery.directory):
                return None
            if digests_of(directory) != digests_in(there):
                return None
            delta = delta_between(delivery.version, weights_in(delivery.directory), base, weights_in(directory))
            if delta is not None:
                decode_delta(delta, max_bytes=decode_limit(num_bytes_of(directory)))
        except (FileNotFoundError, ManifestError, RestoreError):
            return None
        return delta

    def _delete_old(self) -> None:
        versions = self.versions()
        anchors = [each for each in versions if delta_file(self._directory, each) is None]
        # The newest first: each delta that is left has its anchor, also if this is interrupted.
        for older in reversed(versions):
            if older < anchors[-self._keep_anchors :][0]:
                self._directory.delete(self._directory.retire(older))


class _Versions:
    """The versions in a directory (`VersionSource`)."""

    def __init__(self, directory: NumberedDirectory) -> None:
        self._directory = directory
        self.name = str(directory.root)

    def versions(self) -> list[int]:
        return self._directory.numbers()

    def digests(self, version: int) -> dict[str, int]:
        there = self._directory.find(version)
        if there is None:
            raise RestoreError(f"expected version {version} in {self.name}, but it was deleted")
        return digests_in(there)

    def opened(
        self,
        wanted: int,  # noqa: ARG002 # of the protocol
        have: Collection[int],  # noqa: ARG002
        parent: Path,  # noqa: ARG002
    ) -> AbstractContextManager[NumberedDirectory]:
        return contextlib.nullcontext(self._directory)


@at_exit
def _wait_for_all() -> None:
    """Wait for running writes when the process exits, but only for a short time, because a write may hang."""
    deadline_s = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join(max(0.0, deadline_s - time.monotonic()))
