"""The index of the checkpoints under a prefix in a bucket, and the claim of the process that may change it.

``steps.json`` (``versions.json`` for published versions) names the owner of the root, and the attempt of each complete
checkpoint. It is the only object that is ever changed, and each change is conditional on the version that was read (RFC
9110, section 13.1.1). So a checkpoint becomes visible in one write, a listing of the bucket that lags behind hides
nothing, and an owner that has lost its claim, for example because it was suspended, can no longer change anything.

The owner writes the object ``.owner-of-steps.json-ID`` again and again. Another process that finds this object
unchanged for `LEASE_S` of its own monotonic clock takes the claim over; no two clocks are compared. A process on the
same host sees at once that the owner has exited.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import obstore
from msgspec import Meta, Struct
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import ObjectStore

from ft_transport.checkpoint.bucket_files import ObjectVersion, list_objects, put_object, read_object, request
from ft_transport.errors import CheckpointError, CheckpointInUseError, ConfigurationError
from ft_transport.runtime.regular_files import UnusableFileError
from ft_transport.runtime.signal_safe import LazyThread, SafeEvent

logger = logging.getLogger(__name__)

LEASE_S: Final = 20.0
"""How long the owner's object must be unchanged before another process takes over."""
_BEAT_S: Final = 4.0
_LOOK_S: Final = 0.5
_MAX_CHANGES: Final = 10
_MAX_INDEX_BYTES: Final = 1 << 28
_FORMAT: Final = 1
_LIST: Final = re.compile(r"(?:step|version)-[0-9]{1,18}/attempt-[0-9a-f]{16}/manifest\.json")
_HEX: Final = r"\A[0-9a-f]{16}\Z"


class Owner(Struct, frozen=True):
    """The process that has claimed a root.

    Attributes:
        id: A random number.
        about: Description of the group, for the errors of other groups.
        host: The running system and its namespace of process IDs; empty if unknown.
        process: ID of the process.
        start: When the process started, in clock ticks since the system has started.
    """

    id: Annotated[str, Meta(pattern=_HEX)]
    about: Annotated[str, Meta(max_length=2000)]
    host: str
    process: int
    start: int


class Index(Struct, frozen=True, kw_only=True):
    """The content of ``steps.json``.

    Attributes:
        format: Version of this format.
        write: A random number, by which a process recognises its own write.
        owner: The owner of the root; ``None`` if nobody has claimed it.
        attempts: The attempt of each complete checkpoint, by the checkpoint's number.
    """

    format: int = _FORMAT
    write: str = ""
    owner: Owner | None = None
    attempts: dict[Annotated[int, Meta(ge=0, lt=10**18)], Annotated[str, Meta(pattern=_HEX)]] = {}


_decoder: Final = msgspec.json.Decoder(Index)
_ended_claims: Final[set[str]] = set()
"""IDs of the claims that this process has ended, which an index may still name if a request failed."""


class BucketIndex:
    """The index of one root. Thread-safe, except `claim` and `release`.

    Args:
        store: obstore's store of the prefix.
        name: URL of the prefix, for messages.
        path: Path of the index object.
    """

    def __init__(self, store: ObjectStore, name: str, path: str) -> None:
        self._store = store
        self._name = name
        self._path = path
        self._owner: Owner | None = None
        self._ended = SafeEvent()

    @property
    def beat_path(self) -> str | None:
        """The path of the object that this process renews as the owner; ``None`` without a claim."""
        return self._beat_path(self._owner) if self._owner is not None else None

    def claim(self, owner: str, timeout_s: float) -> None:
        """Claim the root for this process.

        Raises:
            CheckpointInUseError: Another process has claimed the root, and is alive.
            ConfigurationError: The bucket ignores conditions of writes.
            OSError: The bucket cannot be read or written.
        """
        self._check_conditions()
        about = f"{owner} on host {socket.gethostname()}, process {os.getpid()}"
        mine = Owner(secrets.token_hex(8), about[:2000], _host(), os.getpid(), _start_of(os.getpid()) or 0)
        begun_s = time.monotonic()
        seen: tuple[str, bytes | None] | None = None
        seen_s = begun_s
        num_lost = 0
        while True:
            index, version = self._read()
            if version is None:
                self._refuse_without_index()
            other = index.owner
            # The times before and after the reads, however long the reads take: so the owner was silent for that long.
            looked_s = time.monotonic()
            beat = (other.id, self._beat_of(other)) if other is not None else None
            if other is None or _has_ended(other) or (beat == seen and looked_s - seen_s > LEASE_S):
                self._beat(mine)
                if self._swap(version, msgspec.structs.replace(index, owner=mine)):
                    break
                num_lost += 1
                if num_lost == _MAX_CHANGES:
                    raise self._busy()
            elif beat != seen:
                if seen is not None and time.monotonic() - begun_s > timeout_s:
                    raise CheckpointInUseError(
                        f"expected to be the only group that saves to {self._name}, another group does: {other.about!r}"
                    )
                seen, seen_s = beat, time.monotonic()
            time.sleep(_LOOK_S)
        self._owner, self._ended = mine, SafeEvent()
        beating = functools.partial(_keep_beating, self._store, self._beat_path(mine), self._ended)
        LazyThread(beating, "ft-transport-claim").start()
        if other is not None:
            with contextlib.suppress(OSError):  # the next `BucketRoot.recover` deletes it
                delete_objects(self._store, [self._beat_path(other)])

    def release(self) -> None:
        """End the claim. If the bucket cannot be written, it ends by itself for other processes. Idempotent."""
        self._ended.set()
        owner = self._owner
        if owner is not None:
            _ended_claims.add(owner.id)
            try:
                self.change(lambda index: msgspec.structs.replace(index, owner=None))
                delete_objects(self._store, [self._beat_path(owner)])
            except (OSError, CheckpointInUseError) as error:
                logger.warning("%s: the claim of this process ends in %.0f s: %s", self._name, LEASE_S, error)
            self._owner = None

    def read(self) -> Index:
        """Return the index; an empty one if there is none.

        Raises:
            UnusableFileError: The index is invalid, or has a newer format.
            OSError: The index cannot be read.
        """
        return self._read()[0]

    def check_owner(self, index: Index) -> None:
        """Raise an error if this process does not own the root any more.

        Raises:
            CheckpointInUseError: Another process has taken the root over.
        """
        if self._owner is None or index.owner is None or index.owner.id != self._owner.id:
            by = f": {index.owner.about!r}" if index.owner is not None else ""
            raise CheckpointInUseError(
                f"expected to be the only group that saves to {self._name}, but this group has lost its claim{by}"
            )

    def change(self, change: Callable[[Index], Index]) -> None:
        """Replace the index by ``change(index)``.

        Raises:
            CheckpointInUseError: Another process has taken the root over.
            OSError: The bucket cannot be written.
        """
        for _ in range(_MAX_CHANGES):
            index, version = self._read()
            self.check_owner(index)
            if self._swap(version, change(index)):
                return
            time.sleep(_LOOK_S)
        raise self._busy()

    def _busy(self) -> OSError:
        return OSError(errno.EBUSY, "expected no other program to change the index", f"{self._name}/{self._path}")

    def _read(self) -> tuple[Index, ObjectVersion | None]:
        """Return the index and its version; an empty index and ``None`` if there is none.

        Raises:
            UnusableFileError: The index is invalid, or has a newer format.
            OSError: The index cannot be read.
        """
        try:
            encoded, version = read_object(self._store, self._path, max_bytes=_MAX_INDEX_BYTES)
        except FileNotFoundError:
            return Index(), None
        try:
            index = _decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise UnusableFileError(
                errno.EINVAL, f"expected the index of checkpoints: {error}", f"{self._name}/{self._path}"
            ) from error
        if index.format != _FORMAT:
            raise UnusableFileError(
                errno.EINVAL, f"expected format {_FORMAT}, got {index.format}", f"{self._name}/{self._path}"
            )
        return index, version

    def _swap(self, version: ObjectVersion | None, index: Index) -> bool:
        """Replace the index if it still has this version. Return whether this write took effect."""
        encoded = msgspec.json.encode(msgspec.structs.replace(index, write=secrets.token_hex(8)))
        try:
            put_object(self._store, self._path, encoded, mode="create" if version is None else version)
        except (AlreadyExistsError, PreconditionError):
            # A repeated request fails if the first one took effect and only its answer was lost.
            return self._has_content(encoded)
        except OSError:
            if self._has_content(encoded):
                return True
            raise
        return True

    def _has_content(self, encoded: bytes) -> bool:
        try:
            return read_object(self._store, self._path, max_bytes=_MAX_INDEX_BYTES)[0] == encoded
        except FileNotFoundError:
            return False

    def _check_conditions(self) -> None:
        """Raise an error if the bucket ignores conditions, as some servers with the interface of S3 do."""
        # Twice, because the present owner of the root may delete the object of a trial as a leftover.
        ignored = [name for name in self._ignored_conditions() if name in self._ignored_conditions()]
        if ignored:
            raise ConfigurationError(
                f"expected a bucket that supports conditional writes ({', '.join(ignored)}), {self._name} ignores the "
                "condition; without it, two groups could damage each other's checkpoints"
            )

    def _ignored_conditions(self) -> list[str]:
        path = f".probe-{secrets.token_hex(8)}"
        old = put_object(self._store, path, b"old")
        put_object(self._store, path, b"new")
        ignored = []
        try:
            for name, mode in (("If-None-Match", "create"), ("If-Match", old)):
                with contextlib.suppress(AlreadyExistsError, PreconditionError):
                    put_object(self._store, path, b"never", mode=mode)
                    ignored.append(name)
        finally:
            delete_objects(self._store, [path])
        return ignored

    def _refuse_without_index(self) -> None:
        """Raise an error if the prefix has checkpoints of an index that is lost, which would all be deleted."""
        lost = [path for path in list_objects(self._store) if _LIST.fullmatch(path)]
        if lost:
            raise CheckpointError(
                f"expected the index {self._path} beside the checkpoints in {self._name}, such as {lost[0]}; restore "
                "the index, or save to another prefix"
            )

    def _beat_path(self, owner: Owner) -> str:
        return f".owner-of-{self._path}-{owner.id}"

    def _beat(self, owner: Owner) -> None:
        put_object(self._store, self._beat_path(owner), secrets.token_bytes(8))

    def _beat_of(self, owner: Owner) -> bytes | None:
        try:
            return read_object(self._store, self._beat_path(owner), max_bytes=1000)[0]
        except FileNotFoundError:
            return None


def delete_objects(store: ObjectStore, paths: Sequence[str]) -> None:
    """Delete objects. Those that do not exist are ignored."""
    if not paths:
        return
    try:
        request(paths[0], lambda: obstore.delete(store, list(paths)))
    except FileNotFoundError:
        # Google's and Azure's deletion ends at the first missing object.
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                request(path, functools.partial(obstore.delete, store, path))


def _keep_beating(store: ObjectStore, path: str, ended: SafeEvent) -> None:
    """Show that the owner is alive, until ``ended`` is set. A failed write is tried again at the next beat."""
    while not ended.wait(_BEAT_S):
        try:
            put_object(store, path, secrets.token_bytes(8))
        except Exception as error:
            logger.warning("the claim of a bucket could not be renewed: %s", error)


def _host() -> str:
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(process: int) -> int | None:
    """Return when a process started, in clock ticks (``man 5 proc``); ``None`` if that is unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _has_ended(owner: Owner) -> bool:
    """Return whether this process has ended the claim, or another process on this host that has certainly exited."""
    if owner.id in _ended_claims:
        return True
    if owner.host == "" or owner.host != _host():
        return False
    try:
        os.kill(owner.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # Another process may have the same ID by now. Unreadable if /proc hides other users' processes.
    start = _start_of(owner.process)
    return start is not None and start != owner.start
