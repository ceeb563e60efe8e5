"""Versions as files of deltas, for engines that share no fast disk with the trainer but a directory, or a bucket.

A version there is a directory, `version-N`: whole, an anchor, or a delta on top of the version that is named in it. To
the publisher the directory is one more engine, so it has a deadline, is told again after a failure, and may skip
versions while it is busy. On the other side `DeltaDirectory.restore` makes whole versions of it, on a local disk.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.errors import EngineRefusedError, IntegrityError, RestoreError
from ft_transport.publish.deltas import delta_between
from ft_transport.publish.engines.engine import Delivery, EngineConnection
from ft_transport.publish.serving import weights_in
from ft_transport.settings import check_number
from ft_transport.state.views import as_bytes
from ft_transport.wire.chunks import digest
from ft_transport.wire.delta import MAX_SHARE, Bytes, Delta, apply_changes, decode_delta

_DELTA_NAME: Final = ".delta"
_DIGESTS_NAME: Final = ".digests.json"
"""No file of a version begins with a dot."""
_SAFETENSORS: Final = ".safetensors"
_MAX_HEADER_BYTES: Final = 100 << 20
"""Of a safetensors file: what its own library accepts."""


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
        return await asyncio.to_thread(self._write, delivery)

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """See `PolledEngine`: the newest version that is there."""
        del connection, newest
        return max(await asyncio.to_thread(self.versions), default=None)

    def restore(self, directory: str | os.PathLike[str], version: int | None = None, *, keep: int = 2) -> Path:
        """Makes a version whole on a local disk, out of the newest one there that deltas lead from, or of an anchor.

        Args:
            directory: Where whole versions are; made if it is not there. One process at a time writes there.
            version: Which one; by default the newest.
            keep: So many of the newest there are not deleted.

        Returns:
            Its directory, complete and on disk: what ``from_pretrained`` or an engine reads.

        Raises:
            RestoreError: There is no such version, or a delta on the way to it is missing.
            IntegrityError: What the deltas lead to is not the version, from an anchor on as well.
            OSError: A file cannot be read or written.
        """
        local = NumberedDirectory(Path(directory), "version", None)
        local.recover()
        versions = self.versions()
        wanted = version if version is not None else max(versions, default=-1)
        if (found := local.find(wanted)) is not None:
            return found
        if wanted not in versions:
            raise RestoreError(f"expected version {wanted} in {self._directory.root}, which has {versions or 'none'}")
        try:
            path = self._restore(local, wanted, local.numbers())
        except IntegrityError:
            # The whole that is here may be what is damaged.
            path = self._restore(local, wanted, [])
        for older in local.numbers()[:-keep]:
            local.delete(local.retire(older))
        return path

    # ------------------------------------------------------------------------------------------------------- writing

    def _write(self, delivery: Delivery) -> int:
        with self._mutex:
            versions = self.versions()
            if delivery.version in versions:
                return delivery.version
            if versions and delivery.version < versions[-1]:
                raise EngineRefusedError(
                    f"expected a version after {versions[-1]}, which lies in {self._directory.root}", peer=self.url
                )
            path = self._directory.begin(delivery.version)
            delta = self._delta_to(delivery, versions)
            for source in sorted(delivery.directory.iterdir()):
                if delta is None or source.suffix != _SAFETENSORS:
                    _copy(source, path / source.name)
            if delta is not None:
                write_small(path / _DELTA_NAME, delta)
            else:
                digests = {
                    name: f"{digest(as_bytes(tensor).numpy().data):016x}"
                    for name, tensor in weights_in(delivery.directory).items()
                }
                write_small(path / _DIGESTS_NAME, msgspec.json.encode(digests))
            self._directory.commit(delivery.version)
            self._delete_old()
            return delivery.version

    def _delta_to(self, delivery: Delivery, versions: Sequence[int]) -> bytes | None:
        base = versions[-1] if versions else None
        recent = versions[max(0, len(versions) - self._anchor_every + 1) :]
        if base is None or all(self._delta_file(each) is not None for each in recent):
            return None
        directory = delivery.directory.parent / f"version-{base}"
        if not directory.is_dir():
            return None
        return delta_between(delivery.version, weights_in(delivery.directory), base, weights_in(directory))

    def _delete_old(self) -> None:
        versions = self.versions()
        anchors = [each for each in versions if self._delta_file(each) is None]
        for older in versions:
            if older < anchors[-self._keep_anchors :][0]:
                self._directory.delete(self._directory.retire(older))

    # ------------------------------------------------------------------------------------------------------ restoring

    def _restore(self, local: NumberedDirectory, wanted: int, have: Sequence[int]) -> Path:
        deltas: list[Delta] = []
        most = max(map(self._num_bytes, self.versions())) // MAX_SHARE
        base = wanted
        while base not in have and (file := self._delta_file(base)) is not None:
            deltas.append(decode_delta(file.read_bytes(), max_bytes=most))
            if deltas[-1].version != base or deltas[-1].base >= base:
                raise RestoreError(f"expected a delta to version {base} in {file}, got one to {deltas[-1].version}")
            base = deltas[-1].base
        start = local.find(base) if base in have else self._directory.find(base)
        if start is None:
            raise RestoreError(
                f"expected all deltas up to version {wanted}, version {base} is missing; {self._directory.root} has "
                f"{self.versions()}"
            )
        path = local.begin(wanted)
        for source in start.iterdir():
            if source.suffix == _SAFETENSORS:
                _copy(source, path / source.name)
        newest = self._directory.find(wanted)
        assert newest is not None, "it is there"
        for source in newest.iterdir():
            if source.suffix != _SAFETENSORS and source.name not in (_DELTA_NAME, _DIGESTS_NAME):
                _copy(source, path / source.name)
        with _tensors_of(path) as tensors:
            for delta in reversed(deltas):
                for change in delta.changes():
                    tensor = tensors.get(change.tensor.name)
                    if tensor is None or len(tensor) != change.tensor.num_bytes:
                        raise RestoreError(
                            f"expected {change.tensor.num_bytes} bytes in version {delta.base}", path=change.tensor.name
                        )
                    apply_changes(change, tensor)
            self._verify(wanted, deltas[0] if deltas else None, newest, tensors)
        for file in path.iterdir():
            file.chmod(0o444)
        return local.commit(wanted)

    @staticmethod
    def _verify(version: int, delta: Delta | None, source: Path, tensors: Mapping[str, Bytes]) -> None:
        if delta is not None:
            expected = {tensor.name: tensor.digest for tensor in delta.tensors}
        else:
            told = msgspec.json.decode((source / _DIGESTS_NAME).read_bytes(), type=dict[str, str])
            expected = {name: int(each, 16) for name, each in told.items()}
        if expected.keys() != tensors.keys():
            raise RestoreError(
                f"expected the tensors of version {version}, got {sorted(expected ^ tensors.keys())[:5]}"
            )
        for name, tensor in tensors.items():
            actual = digest(tensor.data)
            if actual != expected[name]:
                raise IntegrityError(
                    f"a tensor is not that of version {version}",
                    chunk=None,
                    expected=expected[name],
                    actual=actual,
                    path=name,
                    step=version,
                )

    def _num_bytes(self, version: int) -> int:
        directory = self._directory.find(version)
        files = directory.glob(f"*{_SAFETENSORS}") if directory is not None else ()
        return sum(file.stat().st_size for file in files)

    def _delta_file(self, version: int) -> Path | None:
        directory = self._directory.find(version)
        file = directory / _DELTA_NAME if directory is not None else None
        return file if file is not None and file.exists() else None


@contextmanager
def _tensors_of(directory: Path) -> Iterator[dict[str, Bytes]]:
    """The bytes of all tensors in the safetensors files of a directory, to be changed in place and synced."""
    maps: list[np.memmap[tuple[int], np.dtype[np.uint8]]] = []
    tensors: dict[str, Bytes] = {}
    for file in sorted(directory.glob(f"*{_SAFETENSORS}")):
        data = np.memmap(file, np.uint8, "r+")
        length = int.from_bytes(data[:8].tobytes(), "little")
        if length > min(_MAX_HEADER_BYTES, len(data) - 8):
            raise RestoreError(f"expected a safetensors file, got {file}")
        header = msgspec.json.decode(data[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        for name, raw in header.items():
            start, end = msgspec.json.decode(raw, type=_Entry).data_offsets
            tensors[name] = data[8 + length + start : 8 + length + end]
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
