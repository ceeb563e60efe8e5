"""The files of a checkpoint in a bucket of S3, Google Cloud Storage or Azure, through the library obstore.

A checkpoint lies under ``step-N/attempt-X/``, where ``X`` is a random number. A file is stored in parts of
`PART_BYTES`, each an object of its own: ``__0_0.distcp.0``, ``__0_0.distcp.1`` and so on. Each part is one request,
which obstore repeats if it fails. So a process that dies leaves whole objects, which the next owner deletes, and no
multipart upload, which would be invisible and cost money. ``manifest.json`` and ``shared.json`` are one object each.

``shared.json`` names the files of this checkpoint whose objects belong to an earlier one, and where they are. It needs
no signature: the digests in the signed ``manifest.json`` cover the bytes of every file.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import obstore
from obstore import exceptions as errors
from obstore.store import ObjectStore, from_url

from ft_transport.checkpoint.files import BucketTimeoutError, Buffer, FileSink, FileSource, Identity
from ft_transport.checkpoint.manifest import CHUNK_BYTES, FileEntry
from ft_transport.errors import ConfigurationError
from ft_transport.runtime.regular_files import UnusableFileError
from ft_transport.runtime.threads import SafeExecutor, outcome_of

T = TypeVar("T")

PART_BYTES: Final = 4 * CHUNK_BYTES
"""Length of all parts of a file but the last. A multiple of `CHUNK_BYTES`, so that a chunk lies in one part."""
_NUM_UPLOADS: Final = 8
_SHARED_NAME: Final = "shared.json"
_MAX_SHARED_BYTES: Final = 1 << 28
_FOLDER: Final = r"(?:step|version)-[0-9]{1,18}/attempt-[0-9a-f]{16}"
_LOCATION: Final = re.compile(rf"(.+)/({_FOLDER})")
_STORED: Final = re.compile(rf"{_FOLDER}/[A-Za-z0-9_.-]{{1,255}}")
_RETRIES: Final[dict[str, Any]] = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
}

ObjectVersion: TypeAlias = dict[str, str]
"""Identifies a version of an object in the conditions of a write: its entity tag, or its generation."""

_MISSING: Final[Identity] = (-1, "")
"""Stands for a part that a listing lacks, in the identity of a file."""
_user: int | None = None
"""ID of the process that made the first request."""
_shared_decoder: Final = msgspec.json.Decoder(dict[str, str])


@lru_cache(maxsize=64)
def open_bucket(url: str) -> ObjectStore:
    """Return obstore's store of a prefix in a bucket. Credentials come from the environment.

    Raises:
        ConfigurationError: obstore refuses the URL, or the settings in the environment.
    """
    try:
        # Options for the client would replace those in the environment, such as AWS_ALLOW_HTTP.
        return from_url(url, retry_config=_RETRIES)  # type: ignore[call-overload,no-any-return]
    except (errors.BaseError, ValueError) as error:
        raise ConfigurationError(
            f"expected a usable URL and credentials in the environment for {url}: {error}"
        ) from error


def request(path: str, call: Callable[[], T]) -> T:
    """Call a function of obstore, and convert its errors to an ``OSError``, except those of failed conditions.

    On the main thread, a signal handler may raise during the call, for example ``KeyboardInterrupt``.

    Raises:
        FileNotFoundError: The object does not exist.
        PermissionError: The credentials were refused.
        BucketTimeoutError: The request failed for another reason, after obstore's retries.
        ConfigurationError: This process was forked from one that has used a bucket.
    """
    global _user  # noqa: PLW0603
    process = os.getpid()
    if _user not in (None, process):
        # The threads of obstore do not exist in a forked child, so the call would never return.
        raise ConfigurationError(
            f"expected a process that was not forked from a user of buckets, got process {process}, forked from "
            f"{_user}; start it with the method spawn or forkserver"
        )
    _user = process
    outcome = outcome_of(call)
    if not isinstance(outcome, Exception) or isinstance(outcome, (errors.AlreadyExistsError, errors.PreconditionError)):
        return _result(outcome)
    if isinstance(outcome, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, _shown(outcome), path) from outcome
    if isinstance(outcome, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
        raise PermissionError(errno.EACCES, _shown(outcome), path) from outcome
    if isinstance(outcome, errors.BaseError):
        raise BucketTimeoutError(errno.ETIMEDOUT, _shown(outcome), path) from outcome
    raise outcome


def _result(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def list_objects(store: ObjectStore, prefix: str | None = None) -> dict[str, Identity]:
    """Return all objects whose path begins with the folder ``prefix``: length and entity tag by path."""
    return request(
        prefix or "",
        lambda: {
            each["path"]: (each["size"], each["e_tag"] or "") for page in obstore.list(store, prefix) for each in page
        },
    )


def read_object(store: ObjectStore, path: str, *, max_bytes: int) -> tuple[bytes, ObjectVersion]:
    """Return the content of a small object, and its version for a conditional write.

    Raises:
        FileNotFoundError: The object does not exist.
        UnusableFileError: The object has more than ``max_bytes``.
        OSError: The object cannot be read.
    """

    def read() -> tuple[bytes, ObjectVersion]:
        found = obstore.get(store, path)
        if found.meta["size"] > max_bytes:
            raise UnusableFileError(
                errno.EFBIG, f"expected at most {max_bytes} bytes, got {found.meta['size']} bytes", path
            )
        return bytes(found.bytes()), version_of(found.meta)

    return request(path, read)


def put_object(store: ObjectStore, path: str, content: Any, mode: Any = "overwrite") -> ObjectVersion:
    """Store an object by one request, and return its version.

    Args:
        store: obstore's store of the prefix.
        path: The path.
        content: One buffer, or several.
        mode: The condition of the write, as for ``obstore.put``.
    """
    return version_of(request(path, lambda: obstore.put(store, path, content, mode=mode, use_multipart=False)))


def version_of(described: Any) -> ObjectVersion:
    """Return the version in obstore's description of an object."""
    return {name: text for name in ("e_tag", "version") if (text := described.get(name)) is not None}


class BucketFiles:
    """The files of a checkpoint in a bucket (`CheckpointFiles`).

    Args:
        location: URL of the checkpoint.
        store: obstore's store of the root; by default, that of the URL.

    Attributes:
        shared: Paths of the objects that `share` found, by file name, without the number of the part.
    """

    num_readers = 12

    def __init__(self, location: str, store: ObjectStore | None = None) -> None:
        matched = _LOCATION.fullmatch(location)
        if matched is None:
            raise ConfigurationError(f"expected the URL of a checkpoint in a bucket, got {location!r}")
        self._store = store if store is not None else open_bucket(matched[1])
        self._folder = matched[2]
        self.shared: dict[str, str] = {}
        self._stored: Mapping[str, str] | None = None
        self._listed: dict[str, dict[str, Identity]] = {}

    def create(self, name: str) -> FileSink:
        """Create a file."""
        return _PartSink(self._store, f"{self._folder}/{name}")

    def open(self, entry: FileEntry) -> FileSource:
        """Open a file, which may be shared."""
        path = self._path_of(entry.name)
        folder = path.rpartition("/")[0]
        if folder not in self._listed:
            self._listed[folder] = list_objects(self._store, folder)
        return _PartSource(self._store, path, entry.num_bytes, self._listed[folder])

    def read_list(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of the list of files."""
        return read_object(self._store, f"{self._folder}/{name}", max_bytes=max_bytes)[0]

    def identity(self, entry: FileEntry) -> Identity:
        """Return the path of a file, and the length and entity tag of each part."""
        return self._identity(entry, self._path_of(entry.name))

    def share(self, entry: FileEntry, identity: Identity, last: str) -> bool:  # noqa: ARG002 # the identity has the path
        """Refer to the objects of a file, unless they were deleted or have changed."""
        path = str(identity[0])
        try:
            if self._identity(entry, path) != identity or _MISSING[0] in identity:
                return False
        except OSError:
            return False
        if not path.startswith(f"{self._folder}/"):
            self.shared[entry.name] = path
        return True

    def put_shared(self, shared: Mapping[str, str]) -> None:
        """Store ``shared.json``, if any rank shares objects."""
        if shared:
            path = f"{self._folder}/{_SHARED_NAME}"
            put_object(self._store, path, msgspec.json.encode(shared))

    def read_shared(self) -> Mapping[str, str]:
        """Return the content of ``shared.json``; empty if it does not exist.

        Raises:
            UnusableFileError: The content is invalid.
            OSError: The object cannot be read.
        """
        path = f"{self._folder}/{_SHARED_NAME}"
        try:
            encoded, _ = read_object(self._store, path, max_bytes=_MAX_SHARED_BYTES)
        except FileNotFoundError:
            return {}
        try:
            shared = _shared_decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnusableFileError(errno.EINVAL, f"expected names and paths of objects: {error}", path) from error
        if not all(_STORED.fullmatch(each) for each in shared.values()):
            raise UnusableFileError(errno.EINVAL, "expected paths of objects of other checkpoints", path)
        return shared

    def sync(self) -> None:
        """Do nothing: an object is durable when its request has succeeded."""

    def _path_of(self, name: str) -> str:
        if name in self.shared:
            return self.shared[name]
        if self._stored is None:
            self._stored = self.read_shared()
        return self._stored.get(name, f"{self._folder}/{name}")

    def _identity(self, entry: FileEntry, path: str) -> Identity:
        folder = path.rpartition("/")[0]
        # Cached, because a save looks up several files; objects that another process deletes meanwhile are not found.
        paths = [f"{path}.{number}" for number in range(_num_parts(entry.num_bytes))]
        if not self._listed.get(folder, {}).keys() >= set(paths):
            self._listed[folder] = list_objects(self._store, folder)
        listed = self._listed.get(folder, {})
        return (path, *(each for part in paths for each in listed.get(part, _MISSING)))


class _PartSink:
    """Writes a file as objects of `PART_BYTES`, several at once, straight from the buffers."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store = store
        self._path = path
        self._number = 0
        self._buffers: list[memoryview] = []
        self._num_bytes = 0
        self._pool = SafeExecutor(_NUM_UPLOADS, "ft-transport-upload")
        self._uploads: deque[Future[None]] = deque()

    def write(self, buffers: list[Buffer], num_bytes: int) -> None:  # noqa: ARG002 # of the protocol
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                piece = view[: PART_BYTES - self._num_bytes]
                self._buffers.append(piece)
                self._num_bytes += len(piece)
                view = view[len(piece) :]
                if self._num_bytes == PART_BYTES:
                    if len(self._uploads) == _NUM_UPLOADS:
                        self._uploads.popleft().result()
                    self._uploads.append(self._pool.submit(self._put, *self._next_part()))

    def finish(self) -> None:
        if self._buffers:
            # Most files are small, and need no thread.
            self._put(*self._next_part())
        while self._uploads:
            self._uploads.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _next_part(self) -> tuple[str, list[memoryview]]:
        path, buffers = f"{self._path}.{self._number}", self._buffers
        self._number += 1
        self._buffers, self._num_bytes = [], 0
        return path, buffers

    def _put(self, path: str, buffers: Sequence[memoryview]) -> None:
        put_object(self._store, path, buffers)


class _PartSource:
    def __init__(self, store: ObjectStore, path: str, num_bytes: int, listed: Mapping[str, Identity]) -> None:
        self._store = store
        self._path = path
        self._num_bytes = num_bytes
        self._listed = listed

    def length(self) -> int:
        """Return the expected length, if every part has its own. A part that the listing lacks is looked up.

        Raises:
            UnusableFileError: A part has another length.
        """
        for number in range(_num_parts(self._num_bytes)):
            path = f"{self._path}.{number}"
            expected, found = min(PART_BYTES, self._num_bytes - number * PART_BYTES), self._length_of(path)
            if found != expected:
                raise UnusableFileError(errno.EINVAL, f"expected {expected} bytes, got {found} bytes", path)
        return self._num_bytes

    def read_into(self, target: memoryview, position: int) -> int:
        number, start = divmod(position, PART_BYTES)
        count = min(len(target), PART_BYTES - start)
        path = f"{self._path}.{number}"
        data = memoryview(request(path, lambda: obstore.get_range(self._store, path, start=start, length=count)))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""

    def _length_of(self, path: str) -> int:
        if (listed := self._listed.get(path)) is not None:
            return int(listed[0])
        return int(request(path, lambda: obstore.head(self._store, path)["size"]))


def _num_parts(num_bytes: int) -> int:
    return -(-num_bytes // PART_BYTES)


def _shown(error: Exception) -> str:
    # The library appends its debugging output.
    return str(error).partition("\n\nDebug source:")[0]
