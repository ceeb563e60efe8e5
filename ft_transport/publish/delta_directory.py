"""Versions as files of deltas, for engines that share no fast disk with the trainer but a directory, or a bucket.

A version there is a directory, `version-N`: whole, an anchor, or a delta on top of the version that is named in it. To
the publisher the directory is one more engine, so it has a deadline, is told again after a failure, and may skip
versions while it is busy. On the other side `DeltaDirectory.restore` makes whole versions of it, on a local disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.errors import EngineRefusedError, EngineUnreachableError, IntegrityError, RestoreError
from ft_transport.publish.deltas import delta_between
from ft_transport.publish.engines.engine import Delivery, EngineConnection
from ft_transport.publish.serving import weights_in
from ft_transport.settings import check_duration, check_number
from ft_transport.wire.chunks import Hasher
from ft_transport.wire.delta import Bytes, Delta, apply_changes, decode_delta

logger = logging.getLogger(__name__)

_DELTA_NAME: Final = ".delta"
_DIGESTS_NAME: Final = ".digests.json"
"""No file of a version begins with a dot, so a user's file has neither name."""
_SAFETENSORS: Final = ".safetensors"
_MAX_HEADER_BYTES: Final = 100 << 20
"""Of a safetensors file: what its own library accepts."""
_READ_BYTES: Final = 4 << 20
_TURN_S: Final = 0.05


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


class DeltaDirectory:
    """A directory of deltas: an engine of a publisher, and what makes whole versions of it elsewhere.

    Args:
        root: Where it is. One publisher at a time writes there.
        anchor_every: So many versions from one that is whole to the next, at most.
        keep_anchors: What is older than so many of the newest whole ones is deleted.
    """

    headers: Mapping[str, str] = {}

    def __init__(self, root: str | os.PathLike[str], *, anchor_every: int = 10, keep_anchors: int = 2) -> None:
        self._anchor_every = check_number("anchor_every", anchor_every, at_least=1)
        self._keep_anchors = check_number("keep_anchors", keep_anchors, at_least=1)
        self._directory = NumberedDirectory(Path(root).absolute(), "version", None)
        self._mutex = threading.Lock()
        self.url = self._directory.root.as_uri()

    def versions(self) -> list[int]:
        """The versions that are there, ascending."""
        return self._directory.numbers()

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`: writes the version, as a delta where that is smaller."""
        del connection
        # A directory that hangs holds one thread, and not all those that the notifier tells other engines with.
        while (version := await asyncio.to_thread(self._write_in_turn, delivery)) is None:
            await asyncio.sleep(_TURN_S)
        return version

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """See `PolledEngine`: the newest version that is there."""
        del connection, newest
        return await asyncio.to_thread(self._newest)

    def restore(
        self,
        directory: str | os.PathLike[str],
        version: int | None = None,
        *,
        keep: int = 2,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Path:
        """Makes a version whole on a local disk, out of the newest one there that deltas lead from, or of an anchor.

        Args:
            directory: Where whole versions are; made if it is not there. Of several who restore to it at once, one does
                and the others wait for it.
            version: Which one; by default the newest.
            keep: So many of the newest there are not deleted, nor is what is returned.
            timeout: How long to wait for others.

        Returns:
            Its directory, complete and on disk: what ``from_pretrained`` or an engine reads.

        Raises:
            RestoreError: There is no such version, or a delta on the way to it is missing.
            IntegrityError: What the deltas lead to is not the version, from an anchor on as well.
            CheckpointInUseError: Another process, such as a publisher, writes to ``directory`` all the time.
            OSError: A file cannot be read or written.
        """
        keep = check_number("keep", keep, at_least=1)
        check_duration("timeout", timeout, at_least=timedelta(0))
        local = NumberedDirectory(Path(directory), "version", None)
        versions = self.versions()
        wanted = version if version is not None else max(versions, default=-1)
        if (found := local.find(wanted)) is not None:
            return found
        if wanted not in versions:
            raise RestoreError(f"expected version {wanted} in {self._directory.root}, which has {versions or 'none'}")
        claim = RootClaim(local.root)
        claim.take("restoring versions", timeout.total_seconds())
        try:
            local.recover()
            return local.find(wanted) or self._restore_to(local, wanted, keep)
        finally:
            claim.release()

    # ------------------------------------------------------------------------------------------------------- writing

    def _write_in_turn(self, delivery: Delivery) -> int | None:
        """`_write`; ``None`` while another version is being written."""
        if not self._mutex.acquire(blocking=False):
            return None
        try:
            return self._write(delivery)
        finally:
            self._mutex.release()

    def _newest(self) -> int | None:
        if not self._mutex.acquire(blocking=False):
            raise EngineUnreachableError(f"expected an answer of {self._directory.root}, which is busy", peer=self.url)
        try:
            return max(self.versions(), default=None)
        finally:
            self._mutex.release()

    def _write(self, delivery: Delivery) -> int:
        self._directory.recover()
        versions = self.versions()
        digests = _digests_of(delivery.directory)
        if (there := self._directory.find(delivery.version)) is not None:
            if _digests_in(there) == digests:
                return delivery.version
            raise EngineRefusedError(
                f"expected a directory of this run, {self._directory.root} has another version {delivery.version}",
                peer=self.url,
            )
        if versions and delivery.version < versions[-1]:
            raise EngineRefusedError(
                f"expected a version after {versions[-1]}, which lies in {self._directory.root}", peer=self.url
            )
        path = self._directory.begin(delivery.version)
        try:
            delta = self._delta_to(delivery, versions)
            for source in sorted(delivery.directory.iterdir()):
                if delta is None or source.suffix != _SAFETENSORS:
                    _copy(source, path / source.name)
            if delta is not None:
                write_small(path / _DELTA_NAME, delta)
            told = {name: f"{each:016x}" for name, each in sorted(digests.items())}
            write_small(path / _DIGESTS_NAME, msgspec.json.encode(told))
            self._directory.commit(delivery.version)
        except BaseException:
            # Parts of versions that failed must not fill what is full already.
            with contextlib.suppress(OSError):
                self._directory.discard(delivery.version)
            raise
        try:
            self._delete_old()
        except OSError as error:
            logger.warning("old versions in %s could not be deleted: %s", self._directory.root, error)
        return delivery.version

    def _delta_to(self, delivery: Delivery, versions: Sequence[int]) -> bytes | None:
        base = versions[-1] if versions else None
        recent = versions[max(0, len(versions) - self._anchor_every + 1) :]
        if base is None or all(self._delta_file(each) is not None for each in recent):
            return None
        directory = delivery.directory.parent / f"version-{base}"
        there = self._directory.find(base)
        try:
            # The delta says what is in the files, and not how it is laid out there.
            if there is None or _headers_of(directory) != _headers_of(delivery.directory):
                return None
            if _digests_of(directory) != _digests_in(there):
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

    def _restore_to(self, local: NumberedDirectory, wanted: int, keep: int) -> Path:
        have = local.numbers()
        try:
            path = self._restore(local, wanted, have)
        except (IntegrityError, RestoreError):
            # The whole that is here may be what is damaged, or another run's.
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
        most = max(_num_bytes(each) for each in wholes if each is not None)
        base = wanted
        while base not in have and (file := self._delta_file(base)) is not None:
            deltas.append(decode_delta(file.read_bytes(), max_bytes=most))
            if deltas[-1].version != base or deltas[-1].base >= base:
                raise RestoreError(f"expected a delta to version {base} in {file}, got one to {deltas[-1].version}")
            base = deltas[-1].base
        start = local.find(base) if base in have else self._directory.find(base)
        newest = self._directory.find(wanted)
        if start is None or newest is None:
            raise RestoreError(
                f"expected all deltas up to version {wanted}, version {base if start is None else wanted} is missing; "
                f"{self._directory.root} has {self.versions()}"
            )
        path = local.begin(wanted)
        try:
            self._make(path, start, newest, deltas)
            _check_files(path, _digests_in(newest), wanted)
            for file in path.iterdir():
                file.chmod(0o444)
            return local.commit(wanted)
        except BaseException:
            with contextlib.suppress(OSError):
                local.discard(wanted)
            raise

    @staticmethod
    def _make(path: Path, start: Path, newest: Path, deltas: Sequence[Delta]) -> None:
        for source in start.iterdir():
            if source.suffix == _SAFETENSORS:
                _copy(source, path / source.name)
        for source in newest.iterdir():
            if source.suffix != _SAFETENSORS and source.name not in (_DELTA_NAME, _DIGESTS_NAME):
                _copy(source, path / source.name)
        if not deltas:
            return
        with _tensors_of(path) as tensors:
            for delta in reversed(deltas):
                for change in delta.changes():
                    tensor = tensors.get(change.tensor.name)
                    if (
                        tensor is None
                        or len(tensor) != change.tensor.num_bytes
                        or change.tensor.num_bytes % change.tensor.item_bytes
                    ):
                        raise RestoreError(
                            f"expected {change.tensor.num_bytes} bytes in version {delta.base}", path=change.tensor.name
                        )
                    apply_changes(change, tensor)

    def _delta_file(self, version: int) -> Path | None:
        directory = self._directory.find(version)
        file = directory / _DELTA_NAME if directory is not None else None
        return file if file is not None and file.exists() else None


def _digests_of(directory: Path) -> dict[str, int]:
    """The digest of each file of a version, by its name."""
    return {
        file.name: _digest_of(file) for file in directory.iterdir() if file.name not in (_DELTA_NAME, _DIGESTS_NAME)
    }


def _digest_of(file: Path) -> int:
    hasher = Hasher()
    buffer = memoryview(bytearray(_READ_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.intdigest()


def _digests_in(directory: Path) -> dict[str, int]:
    """What the directory of deltas says that `_digests_of` a version is.

    Raises:
        RestoreError: It says nothing.
    """
    file = directory / _DIGESTS_NAME
    try:
        told = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        return {name: int(each, 16) for name, each in told.items()}
    except (FileNotFoundError, ValueError, msgspec.MsgspecError) as error:
        raise RestoreError(f"expected the digests of a version in {file}: {error}") from error


def _check_files(path: Path, expected: Mapping[str, int], version: int) -> None:
    actual = _digests_of(path)
    if expected.keys() != actual.keys():
        raise RestoreError(
            f"expected the files of version {version}, got {sorted(expected.keys() ^ actual.keys())[:5]}"
        )
    for name in sorted(actual):
        if actual[name] != expected[name]:
            raise IntegrityError(
                f"a file is not that of version {version}",
                chunk=None,
                expected=expected[name],
                actual=actual[name],
                path=name,
                step=version,
            )


def _headers_of(directory: Path) -> dict[str, bytes]:
    """What the safetensors files of a version say of their tensors."""
    headers = {}
    for file in directory.glob(f"*{_SAFETENSORS}"):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            headers[file.name] = opened.read(min(length, _MAX_HEADER_BYTES))
    return headers


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob(f"*{_SAFETENSORS}"))


@contextmanager
def _tensors_of(directory: Path) -> Iterator[dict[str, Bytes]]:
    """The bytes of all tensors in the safetensors files of a directory, to be changed in place and synced.

    Raises:
        RestoreError: A file is none of safetensors.
    """
    maps: list[np.memmap[tuple[int], np.dtype[np.uint8]]] = []
    tensors: dict[str, Bytes] = {}
    for file in sorted(directory.glob(f"*{_SAFETENSORS}")):
        try:
            data = np.memmap(file, np.uint8, "r+")
            length = int.from_bytes(data[:8].tobytes(), "little")
            if length > min(_MAX_HEADER_BYTES, len(data) - 8):
                raise RestoreError(f"expected a safetensors file, got {file}")
            header = msgspec.json.decode(data[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            for name, raw in header.items():
                start, end = msgspec.json.decode(raw, type=_Entry).data_offsets
                if not 0 <= start <= end <= len(data) - 8 - length:
                    raise RestoreError(f"expected tensors inside of {file}", path=name)
                tensors[name] = data[8 + length + start : 8 + length + end]
        except (ValueError, msgspec.MsgspecError) as error:
            # ValueError: it is empty.
            raise RestoreError(f"expected a safetensors file, got {file}: {error}") from error
        maps.append(data)
    yield tensors
    for data in maps:
        data.flush()


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
