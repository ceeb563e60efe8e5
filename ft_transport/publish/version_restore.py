"""Restores whole versions from a `DeltaDirectory`, or from its copy in a bucket, to a local disk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.errors import CheckpointDamagedError, IntegrityError, ManifestError, RestoreError
from ft_transport.publish.deltas import (
    DELTA_NAME,
    DIGESTS_NAME,
    SAFETENSORS,
    check_files,
    copy_file,
    decode_limit,
    num_bytes_of,
    tensors_of,
)
from ft_transport.runtime.regular_files import UnusableFileError, make_read_only, read_regular
from ft_transport.wire.delta import Bytes, Delta, apply_changes, decode_delta

logger = logging.getLogger(__name__)

_MAX_TRIES: Final = 10
"""Number of versions to try, if the publisher deletes each of them while it is restored."""
_UNUSABLE: Final = (CheckpointDamagedError, FileNotFoundError, IntegrityError, ManifestError, RestoreError)
"""Errors that a version causes if it is damaged or deleted, or if it is applied to a version of another run."""


class VersionSource(Protocol):
    """Where published versions are restored from."""

    @property
    def name(self) -> str:
        """The path or URL, for messages."""

    def versions(self) -> list[int]:
        """Return the numbers of all versions, ascending."""

    def digests(self, version: int) -> dict[str, int]:
        """Return the digest of each file of a version, by name."""

    def opened(self, wanted: int, have: Collection[int], parent: Path) -> AbstractContextManager[NumberedDirectory]:
        """Return a context manager of the directory with a version, and with all versions on which its delta depends.

        Args:
            wanted: Number of the version.
            have: Whole versions that the caller has: earlier ones are not needed.
            parent: Where copies may be made. The caller has claimed it.
        """


def restore_version(
    source: VersionSource, local: NumberedDirectory, version: int | None, *, keep: int, timeout_s: float
) -> Path:
    """Restore a version to a local disk (`DeltaDirectory.restore`)."""
    claim = RootClaim(local.root, is_private=local.is_private)
    try:
        claim.take("restoring versions", timeout_s)
        local.recover()
        for _ in range(_MAX_TRIES):
            versions = source.versions()
            if not versions or (version is not None and version not in versions):
                wanted = f"version {version}" if version is not None else "a version"
                raise RestoreError(f"expected {wanted} in {source.name}, which has {listed(versions)}")
            chosen = version if version is not None else versions[-1]
            try:
                return _restore(source, local, chosen, keep)
            except _UNUSABLE as error:
                if chosen in source.versions():
                    raise
                if version is not None:
                    raise RestoreError(
                        f"expected version {version} in {source.name}, but it was deleted while it was restored"
                    ) from error
        raise RestoreError(
            f"expected a version in {source.name} to exist until it is restored, but each of the newest was deleted; "
            "let the publisher keep more anchors"
        )
    finally:
        claim.release()


def listed(versions: Sequence[int]) -> str:
    """Return the numbers of versions for a message."""
    if len(versions) > 10:
        return f"{len(versions)} versions from {versions[0]} to {versions[-1]}"
    return str(list(versions)) if versions else "none"


def _restore(source: VersionSource, local: NumberedDirectory, wanted: int, keep: int) -> Path:
    digests = source.digests(wanted)
    if (found := local.find(wanted)) is not None:
        try:
            check_files(found, digests, wanted)
        except (IntegrityError, RestoreError) as error:
            logger.warning("version %d in %s is damaged, so it is restored again: %s", wanted, local.root, error)
        else:
            return found
    have = [number for number in local.numbers() if number != wanted]
    try:
        path = _restore_by(source, local, wanted, have, digests)
    except _UNUSABLE as error:
        if not have:
            raise
        # A local version may be damaged, or from another run: use an anchor.
        logger.warning("version %d is restored again without local versions: %s", wanted, str(error))
        path = _restore_by(source, local, wanted, [], digests)
    for older in local.numbers()[:-keep]:
        if older != wanted:
            local.delete(local.retire(older))
    return path


def _restore_by(
    source: VersionSource, local: NumberedDirectory, wanted: int, have: Sequence[int], digests: Mapping[str, int]
) -> Path:
    """Restore a version by applying deltas to one of the local versions ``have``, or to an anchor."""
    with source.opened(wanted, have, local.root) as directory:
        wholes = [*map(directory.find, directory.numbers()), *map(local.find, have)]
        limit = decode_limit(max((num_bytes_of(each) for each in wholes if each is not None), default=0))
        chain: list[int] = []
        base = wanted
        while base not in have and (file := delta_file(directory, base)) is not None:
            chain.append(base)
            base = _read_delta(file, base, limit).base
        start = local.find(base) if base in have else directory.find(base)
        newest = directory.find(wanted)
        if start is None or newest is None:
            raise RestoreError(
                f"expected all deltas up to version {wanted}, but version {base if start is None else wanted} is "
                f"missing; {source.name} has {listed(source.versions())}"
            )
        path = local.begin(wanted)
        try:
            _copy_files(path, start, newest, is_private=local.is_private)
            if chain:
                with tensors_of(path) as tensors:
                    # Decoded again, one by one: all of them at once could exceed the memory.
                    for number in reversed(chain):
                        file = delta_file(directory, number)
                        if file is None:
                            raise RestoreError(f"expected a delta to version {number}, but it was deleted")
                        _apply(_read_delta(file, number, limit), tensors)
            check_files(path, digests, wanted)
            for each in path.iterdir():
                make_read_only(each)
            return local.commit(wanted)
        except BaseException:
            with contextlib.suppress(OSError):
                local.discard(wanted)
            raise


def delta_file(directory: NumberedDirectory, version: int) -> Path | None:
    """Return the delta of a version; ``None`` if the version is missing or an anchor."""
    path = directory.find(version)
    file = path / DELTA_NAME if path is not None else None
    return file if file is not None and file.exists() else None


def _read_delta(file: Path, version: int, limit: int) -> Delta:
    try:
        delta = decode_delta(read_regular(file, max_bytes=limit), max_bytes=limit)
    except UnusableFileError as error:
        raise RestoreError(f"expected a delta at {file}: {error}") from error
    if delta.version != version or delta.base >= version:
        raise RestoreError(f"expected a delta to version {version} in {file}, got one to version {delta.version}")
    return delta


def _copy_files(path: Path, start: Path, newest: Path, *, is_private: bool) -> None:
    """Copy the weights of the version on which deltas are applied, and the other files of the wanted version."""
    for source in start.iterdir():
        if source.suffix == SAFETENSORS:
            copy_file(source, path / source.name, is_private=is_private)
    for source in newest.iterdir():
        if source.suffix != SAFETENSORS and source.name not in (DELTA_NAME, DIGESTS_NAME):
            copy_file(source, path / source.name, is_private=is_private)


def _apply(delta: Delta, tensors: Mapping[str, Bytes]) -> None:
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
