"""A file that keeps what a fetch has received, for a process that was killed and started again.

It is sparse and has the layout of the data. What is in it is only ever a hint: a restarted receiver copies each chunk
to its destination and compares the copy with the digest from a source, so that no file can do more harm than none,
whoever has written it.

A thread of its own writes the file, from where the bytes have been received to. The receiving threads never wait for
the disk: if it is slow, less is in the file when the process dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from ft_transport.errors import ConfigurationError, RestoreError
from ft_transport.http.fetch_timeouts import Timeouts
from ft_transport.runtime.handler_safety import SafeEvent, SafeExecutor, SafeThread
from ft_transport.runtime.locked_files import open_locked, unlink_open
from ft_transport.runtime.threads import start
from ft_transport.settings import default_num_threads
from ft_transport.state.restore import Restore
from ft_transport.transfer.sparse_file import chunks_in
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import Manifest

logger = logging.getLogger(__name__)

_MODE: Final = 0o600
_PIECE_BYTES: Final = 1 << 20
"""Written at once: between two of them the writer looks whether it is still wanted."""
_MAX_VIEWS: Final = 512
"""Below IOV_MAX, which Linux puts at 1024 (``man 2 writev``)."""
_DRAIN_S: Final = 2.0
"""How long a fetch that failed waits for what has landed to be written."""
_ABANDON_S: Final = 1.0
"""How much longer it waits for a disk that does not return."""
_LOCK_S: Final = 2.0
"""How long a process that is just ending may keep the file."""


class Spool:
    """One file, which nobody else uses meanwhile. Belongs to the thread that fetches, but for `note`.

    Args:
        path: Of the file; it is made where there is none, and what is in it is lost.
        is_kept: Whether it stays when all has been received.

    Raises:
        ConfigurationError: The file cannot be made, is another user's, a link, no regular file or has other names, or
            another fetch uses it.
    """

    def __init__(self, path: Path, *, is_kept: bool) -> None:
        self._path = path
        self._is_kept = is_kept
        self._writer: _Writer | None = None
        self._descriptor: int | None = _locked(path)
        _spools.add(self)

    def fill(self, manifest: Manifest, restore: Restore, missing: Sequence[int], timeouts: Timeouts) -> list[int]:
        """Copies what there is of the missing chunks to where it belongs.

        Args:
            manifest: With digests.
            restore: Where they belong.
            missing: Ascending.
            timeouts: Of the fetch.

        Returns:
            The chunks that are missing now, ascending.

        Raises:
            DeadlineExceededError: The fetch's deadline passed first.
        """
        descriptor, expected, table = self._open_descriptor(), manifest.digests, manifest.chunks
        assert expected is not None, "they have been asked for"
        there = chunks_in(descriptor, table, starts_at=0)

        def is_copied(chunk: int) -> bool:
            timeouts.check_deadline()
            start, end = table.range_of(chunk, chunk + 1)
            views = restore.buffers(start, end)
            if not _read(descriptor, views, start):
                return False
            timeouts.note_progress()
            return manifest.digester.digest_of(views) == expected[chunk]

        candidates = [chunk for chunk in missing if chunk in there]
        pool = SafeExecutor(default_num_threads(), "ft-transport-spool")
        try:
            outcomes = list(pool.map(is_copied, candidates))
        finally:
            # Nothing is copied any more when this has returned, or has been interrupted.
            pool.shutdown(cancel_futures=True)
        copied = {chunk for chunk, is_good in zip(candidates, outcomes, strict=True) if is_good}
        logger.info("%d of %d chunks are in %s", len(copied), len(missing), self._path)
        return [chunk for chunk in missing if chunk not in copied]

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to copy."""
        try:
            os.lseek(self._open_descriptor(), 0, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole
            return True
        return False

    def begin(self, table: ChunkTable, restore: Restore, on_landed: Callable[[int], None]) -> Callable[[int], None]:
        """Writes what lands from now on, until `pause` or `complete`.

        Args:
            table: The chunks.
            restore: Where they land.
            on_landed: Is told of them too.

        Returns:
            Is to be called with each chunk that has landed, by any thread.
        """
        descriptor = self._open_descriptor()
        with contextlib.suppress(OSError):  # a full disk, or one without sparse files: writing finds that out
            os.ftruncate(descriptor, table.data_bytes)
        writer = self._writer = _Writer(os.dup(descriptor), self._path, table, restore)

        def note(chunk: int) -> None:
            on_landed(chunk)
            writer.note(chunk)

        return note

    def pause(self) -> None:
        """Nothing reads where the bytes were received to any more; waits a little for what has landed."""
        self._stop_writer(time.monotonic() + _DRAIN_S)

    def complete(self, until_s: float) -> None:
        """All has been received: the file is removed, or written to its end.

        Args:
            until_s: When writing has to end, in monotonic seconds.
        """
        self._stop_writer(until_s if self._is_kept else time.monotonic())
        if not self._is_kept:
            self._remove()

    def close(self) -> None:
        """Lets others use it. A file with nothing in it is removed. May be called twice."""
        if self._descriptor is None:
            return
        self.pause()
        if self.is_empty and not self._is_kept:
            self._remove()
        self.forget()

    def forget(self) -> None:
        """Gives up the descriptor; in a forked child, which has it too, the parent keeps the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "it is open"
        return self._descriptor

    def _stop_writer(self, until_s: float) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.end(until_s)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            unlink_open(self._path, self._open_descriptor())


class _Writer:
    """Writes chunks from where they have landed, on a thread of its own; takes the descriptor."""

    def __init__(self, descriptor: int, path: Path, table: ChunkTable, restore: Restore) -> None:
        self._descriptor = descriptor
        self._path = path
        self._table = table
        self._restore = restore
        self._landed: SimpleQueue[int | None] = SimpleQueue()
        self._until_s = float("inf")
        self._ended = SafeEvent()
        try:
            start(SafeThread(target=self._run, name="ft-transport-spool", daemon=True))
        except BaseException:
            os.close(descriptor)
            raise

    def note(self, chunk: int) -> None:
        """A chunk has landed. Called by any thread."""
        self._landed.put(chunk)

    def end(self, until_s: float) -> None:
        """Writes what has landed, but not for longer than this, in monotonic seconds."""
        self._until_s = until_s
        self._landed.put(None)
        left_s = max(0.0, until_s - time.monotonic()) + _ABANDON_S
        try:
            is_over = self._ended.wait(left_s)
        except BaseException:
            # Nothing may read the caller's tensors when this has returned.
            self._until_s = time.monotonic()
            self._ended.wait(_ABANDON_S)
            raise
        if not is_over:
            logger.warning("writing to %s does not return; what is being written there is left alone", self._path)

    def _run(self) -> None:
        try:
            while (chunk := self._landed.get()) is not None and self._write(chunk):
                pass
        except (OSError, RestoreError) as error:
            logger.warning("what is received is not kept in %s any more: %s", self._path, error)
        finally:
            os.close(self._descriptor)
            self._ended.set()

    def _write(self, chunk: int) -> bool:
        """Returns whether there is time for more."""
        start, end = self._table.range_of(chunk, chunk + 1)
        while start < end:
            if time.monotonic() > self._until_s:
                return False
            views = self._restore.present(start, min(start + _PIECE_BYTES, end))
            start += os.pwritev(self._descriptor, views[:_MAX_VIEWS], start)
        return True


_spools: weakref.WeakSet[Spool] = weakref.WeakSet()


def _forget_spools() -> None:
    for spool in list(_spools):
        spool.forget()


# Else a child would keep the lock of a parent that was killed.
os.register_at_fork(after_in_child=_forget_spools)


def _locked(path: Path) -> int:
    """Opens the file, or makes it, when no other fetch has it."""
    descriptor = open_locked(path, kind="spool", mode=_MODE, within_s=_LOCK_S)
    try:
        os.fchmod(descriptor, _MODE)
    except OSError as error:
        os.close(descriptor)
        raise ConfigurationError(f"expected a file that can be locked as spool: {error}") from error
    return descriptor


def _read(descriptor: int, views: Sequence[memoryview], position: int) -> bool:
    """Fills the views from a place in the file; returns whether there was enough to do so."""
    for at in range(0, len(views), _MAX_VIEWS):
        group = views[at : at + _MAX_VIEWS]
        wanted = sum(map(len, group))
        try:
            num_bytes = os.preadv(descriptor, group, position)
        except OSError as error:
            logger.warning("a part of the spool cannot be read: %s", error)
            return False
        # A regular file gives less at its end alone, or 2 GiB at once.
        if num_bytes != wanted:
            return False
        position += num_bytes
    return True
