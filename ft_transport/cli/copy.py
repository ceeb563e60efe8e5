"""``ft-transport copy``: copies a checkpoint between directories and buckets; and local copies for other commands."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ft_transport.cli.contents import NotFoundError, UnreadableError
from ft_transport.errors import CheckpointNotFoundError, ConfigurationError

if TYPE_CHECKING:
    from ft_transport.checkpoint.copying import StoredCheckpoint

_BUCKET: Final = re.compile(r"(?:s3|gs|az|abfss?)://")
_STEP: Final = re.compile(r"(?:^|/)step-[0-9]+/?$")
_DATA: Final = (".distcp", ".safetensors")


def copy_command(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Root of checkpoints, or a step-N in it: a directory or a URL.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Another root: a directory or a URL.")],
) -> None:
    """Copy a checkpoint, by default the newest, to another root, and compare every byte with its digest.

    URLs are those of buckets, such as s3://bucket/run-7; credentials come from the environment. A directory that was
    copied from a bucket can be read by torch.distributed.checkpoint.
    """
    from ft_transport import StoreSettings
    from ft_transport.checkpoint.copying import Copier
    from ft_transport.checkpoint.roots import root_at
    from ft_transport.checkpoint.settings import checked_root

    if _STEP.search(target):
        raise ConfigurationError(f"expected a root of checkpoints as TARGET, got a checkpoint in it: {target}")
    settings, root = StoreSettings(), root_at(checked_root(target), "step")
    with _reading(source):
        found = _found(source)
    with _reading(target):
        root.claim("ft-transport copy", 0)
    with _reading(f"{source} to {target}"):
        try:
            root.recover()
            location = Copier(root, settings.trust(), settings.retry_s).copy(found)
        finally:
            root.release()
    typer.echo(f"✓ copied step {found.step} to {location}")


def is_bucket(target: str) -> bool:
    """Return whether the argument of a command is the URL of a bucket."""
    return _BUCKET.match(target) is not None


def _found(target: str) -> StoredCheckpoint:
    from ft_transport.checkpoint.copying import find_checkpoint

    try:
        return find_checkpoint(target)
    except CheckpointNotFoundError as error:
        raise NotFoundError(error.message) from error


@contextlib.contextmanager
def _reading(target: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableError(f"{target}: {error.strerror or error}") from error


@contextlib.contextmanager
def local_copy(target: str, *, with_data: bool) -> Iterator[tuple[Path, StoredCheckpoint]]:
    """Copy a checkpoint from a bucket to a temporary directory, which lasts until the block ends.

    Args:
        target: The URL of a root, or of a ``step-N`` in it.
        with_data: Whether to copy the data files too.

    Yields:
        The directory, and the checkpoint in the bucket.

    Raises:
        NotFoundError: No such checkpoint exists.
        UnreadableError: The bucket cannot be read.
        CheckpointDamagedError: A copied file differs from its digests.
    """
    from ft_transport import StoreSettings
    from ft_transport.checkpoint.copying import copy_files
    from ft_transport.checkpoint.files import DirectoryFiles
    from ft_transport.checkpoint.manifest import MANIFEST_NAME
    from ft_transport.checkpoint.stored_files import ReadRetries, read_encoded_manifest

    settings = StoreSettings()
    retries = ReadRetries(settings.retry_s)
    with tempfile.TemporaryDirectory(prefix="ft-transport-") as directory:
        with _reading(target):
            found = _found(target)
            path = Path(directory) / f"step-{found.step}"
            os.mkdir(path)
            files = found.files
            encoded = read_encoded_manifest(files, retries)
            manifest = settings.trust().open(encoded, name=MANIFEST_NAME)
            copy_files(
                files,
                DirectoryFiles(path),
                manifest,
                retries,
                is_copied=lambda entry: with_data or not entry.name.endswith(_DATA),
            )
            (path / MANIFEST_NAME).write_bytes(encoded)
        yield path, found
