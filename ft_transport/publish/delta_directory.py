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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import msgspec

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
    IntegrityError,
    RestoreError,
)
from ft_transport.publish.delta_bucket import DeltaBucket
from ft_transport.publish.deltas import (
    DELTA_NAME,
    DIGESTS_NAME,
    SAFETENSORS,
    check_files,
    copy_file,
    delta_between,
    digests_in,
    digests_of,
    headers_of,
    num_bytes_of,
    tensors_of,
)
from ft_transport.publish.engines.engine import Delivery, EngineConnection, in_daemon_thread
from ft_transport.publish.versions import weights_in
from ft_transport.runtime.regular_files import UnusableFileError, make_read_only, read_regular
from ft_transport.runtime.threads import at_exit
from ft_transport.settings import check_duration, check_number
from ft_transport.wire.delta import Delta, apply_changes, decode_delta

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DELTA_SURPLUS_BYTES: Final = 16 << 20
"""Allowance for the header of a delta, added to the size of the weights, which bounds the rest of the delta."""
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Errors with which file systems without locks, such as mounted buckets, refuse a lock."""
_PULLING_NAME: Final = ".pulling"
"""The directory whose lock a process has while it copies versions from a bucket."""
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
            timeout: Longest wait for other processes that restore to ``directory``.

        Returns:
            The local directory of the version, from which ``from_pretrained`` or an engine can load it. All files are
            on disk.

        Raises:
            RestoreError: The version, or a delta that it depends on, is missing.
            IntegrityError: A restored file differs from the file of the version.
            CheckpointInUseError: Another process still restored to ``directory`` when ``timeout`` had passed.
            OSError: A file cannot be read or written.
        """
        keep = check_number("keep", keep, at_least=1)
        check_duration("timeout", timeout, at_least=timedelta(0))
        local = NumberedDirectory(Path(directory), "version", None, is_private=self._is_private)
        versions = self.versions()
        wanted = version if version is not None else max(versions, default=-1)
        if self._is_remote:
            claim = RootClaim(local.root / _PULLING_NAME, is_private=self._is_private)
            claim.take("copying versions from a bucket", timeout.total_seconds())
            try:
                return self._good_local(local, wanted) or self._restore_remote(local, wanted, keep, timeout)
            finally:
                claim.release()
        if (found := self._good_local(local, wanted)) is not None:
            return found
        if wanted not in versions:
            raise RestoreError(f"expected version {wanted} in {self._directory.root}, which has {versions or 'none'}")
        claim = RootClaim(local.root, is_private=self._is_private)
        claim.take("restoring versions", timeout.total_seconds())
        try:
            local.recover()
            return self._good_local(local, wanted) or self._restore_to(local, wanted, keep)
        finally:
            claim.release()

    def _restore_remote(self, local: NumberedDirectory, wanted: int, keep: int, timeout: timedelta) -> Path:
        """Copy what the version depends on from the bucket to the same disk, and restore it from there."""
        assert self._bucket is not None, "the root is a bucket"
        if have := [number for number in local.numbers() if number != wanted]:
            try:
                with self._bucket.pulled(wanted, have, local.root) as pulled:
                    return DeltaDirectory(pulled, private=self._is_private).restore(
                        local.root, wanted, keep=keep, timeout=timeout
                    )
            except (IntegrityError, RestoreError) as error:
                # A local version may be damaged, or from another run: use an anchor.
                logger.warning("version %d is restored again without local versions: %s", wanted, error)
        with self._bucket.pulled(wanted, [], local.root) as pulled:
            return DeltaDirectory(pulled, private=self._is_private).restore(
                local.root, wanted, keep=keep, timeout=timeout
            )

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
        except (OSError, CheckpointError) as error:
            raise EngineUnreachableError(
                f"the versions could not be copied to {self._bucket.url}: {error}", peer=self.url
            ) from error

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Lock the directory against other publishers, if its file system has locks."""
        claim = RootClaim(self._directory.root, is_private=self._is_private)
        try:
            claim.take("a publisher of deltas", 0)
        except CheckpointInUseError as error:
            raise EngineUnreachableError(error.message, peer=self.url) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        try:
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
            recorded = {name: f"{each:016x}" for name, each in sorted(digests.items())}
            write_small(path, DIGESTS_NAME, msgspec.json.encode(recorded), is_private=self._is_private)
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
        if base is None or all(self._delta_file(each) is not None for each in recent):
            return None
        directory = delivery.directory.parent / f"version-{base}"
        there = self._directory.find(base)
        try:
            # A delta has only the values of tensors, so both versions must have files of the same layout.
            if there is None or headers_of(directory) != headers_of(delivery.directory):
                return None
            if digests_of(directory) != digests_in(there):
                return None
            return delta_between(delivery.version, weights_in(delivery.directory), base, weights_in(directory))
        except (FileNotFoundError, RestoreError):
            return None

    def _delete_old(self) -> None:
        versions = self.versions()
        anchors = [each for each in versions if self._delta_file(each) is None]
        for older in versions:
            if older < anchors[-self._keep_anchors :][0]:
                self._directory.delete(self._directory.retire(older))

    # ------------------------------------------------------------------------------------------------------ restoring

    def _good_local(self, local: NumberedDirectory, wanted: int) -> Path | None:
        """Return the local directory of a version if its files match their digests; ``None`` otherwise.

        If the version is no longer in the delta directory, its digests are unknown, and its files count as good.
        """
        found = local.find(wanted)
        if found is None or wanted not in self.versions():
            return found
        try:
            check_files(found, self._digests(wanted), wanted)
        except (IntegrityError, RestoreError) as error:
            logger.warning("version %d in %s is damaged, so it is restored again: %s", wanted, local.root, error)
            return None
        return found

    def _digests(self, version: int) -> dict[str, int]:
        if self._is_remote and self._bucket is not None:
            return self._bucket.digests(version)
        there = self._directory.find(version)
        if there is None:
            raise RestoreError(f"expected version {version} in {self._directory.root}, but it was just deleted")
        return digests_in(there)

    def _restore_to(self, local: NumberedDirectory, wanted: int, keep: int) -> Path:
        have = [number for number in local.numbers() if number != wanted]
        try:
            path = self._restore(local, wanted, have)
        except (IntegrityError, RestoreError):
            # The local version on which the deltas were applied may be damaged, or from another run: use an anchor.
            if not have:
                raise
            path = self._restore(local, wanted, [])
        for older in local.numbers()[:-keep]:
            if older != wanted:
                local.delete(local.retire(older))
        return path

    def _restore(self, local: NumberedDirectory, wanted: int, have: Sequence[int]) -> Path:
        deltas: list[Delta] = []
        wholes = [*map(self._directory.find, self.versions()), *map(local.find, have)]
        most = max(num_bytes_of(each) for each in wholes if each is not None)
        base = wanted
        while base not in have and (file := self._delta_file(base)) is not None:
            deltas.append(decode_delta(_read(file, most + _DELTA_SURPLUS_BYTES), max_bytes=most))
            if deltas[-1].version != base or deltas[-1].base >= base:
                raise RestoreError(
                    f"expected a delta to version {base} in {file}, got one to version {deltas[-1].version}"
                )
            base = deltas[-1].base
        start = local.find(base) if base in have else self._directory.find(base)
        newest = self._directory.find(wanted)
        if start is None or newest is None:
            raise RestoreError(
                f"expected all deltas up to version {wanted}, but version {base if start is None else wanted} is "
                f"missing; {self._directory.root} has the versions {self.versions()}"
            )
        path = local.begin(wanted)
        try:
            self._make(path, start, newest, deltas)
            check_files(path, digests_in(newest), wanted)
            for file in path.iterdir():
                make_read_only(file)
            return local.commit(wanted)
        except BaseException:
            with contextlib.suppress(OSError):
                local.discard(wanted)
            raise

    def _make(self, path: Path, start: Path, newest: Path, deltas: Sequence[Delta]) -> None:
        for source in start.iterdir():
            if source.suffix == SAFETENSORS:
                copy_file(source, path / source.name, is_private=self._is_private)
        for source in newest.iterdir():
            if source.suffix != SAFETENSORS and source.name not in (DELTA_NAME, DIGESTS_NAME):
                copy_file(source, path / source.name, is_private=self._is_private)
        if not deltas:
            return
        with tensors_of(path) as tensors:
            for delta in reversed(deltas):
                for change in delta.changes():
                    tensor = tensors.get(change.tensor.name)
                    if (
                        tensor is None
                        or len(tensor) != change.tensor.num_bytes
                        or change.tensor.num_bytes % change.tensor.item_bytes
                    ):
                        raise RestoreError(
                            f"expected a tensor of {change.tensor.num_bytes} bytes in version {delta.base}",
                            path=change.tensor.name,
                        )
                    apply_changes(change, tensor)

    def _delta_file(self, version: int) -> Path | None:
        directory = self._directory.find(version)
        file = directory / DELTA_NAME if directory is not None else None
        return file if file is not None and file.exists() else None


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(file, max_bytes=max_bytes)
    except UnusableFileError as error:
        raise RestoreError(f"expected a delta at {file}: {error}") from error


@at_exit
def _wait_for_all() -> None:
    """Wait for running writes when the process exits, but only for a short time, because a write may hang."""
    deadline_s = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join(max(0.0, deadline_s - time.monotonic()))
