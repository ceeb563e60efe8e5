"""Uploads complete checkpoints from a directory to a bucket, in a process of its own.

The store of the first rank starts the process, and sends it each complete checkpoint: one line of JSON on the standard
input. The process answers each line once, on the standard output: both are one socket. If several checkpoints wait, it
uploads only the newest. When the store ends the connection, or the trainer has died, the process finishes the upload of
the newest checkpoint, and exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.copying import Copier, StoredCheckpoint
from ft_transport.checkpoint.files import checked_url
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.roots import CheckpointRoot, root_at
from ft_transport.errors import CheckpointInUseError
from ft_transport.runtime.children import child_command, child_environment, close_in_children, making_socket
from ft_transport.runtime.signal_safe import LazyThread, SafeCondition
from ft_transport.settings import check_number

logger = logging.getLogger(__name__)

_NICENESS: Final = 5
_RETRY_S: Final = 10.0
_CLAIM_S: Final = 1.0
_SEND_S: Final = 1.0
"""A process that reads no request for so long is stopped, or hangs."""
_END_S: Final = 5.0
_MAX_ANSWER_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Upload:
    """The uploads of a `CheckpointStore` in a directory: its checkpoints are copied to a bucket in the background.

    Attributes:
        url: The URL of a bucket and a prefix in it, such as ``s3://bucket/run-7``.
        every: A complete checkpoint is uploaded if it is at least so many steps after the last uploaded one.
        keep: Number of checkpoints that remain in the bucket after an upload; ``None`` keeps all.
    """

    url: str
    every: int = 1
    keep: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        check_number("every", self.every, at_least=1)
        if self.keep is not None:
            check_number("keep", self.keep, at_least=1)


class _Request(Struct):
    """A complete checkpoint: its step, and the path of its directory."""

    step: int
    location: str


class _Answer(Struct):
    """The outcome for one request. ``error`` is empty if the checkpoint was uploaded, or needs no upload."""

    step: int
    error: str = ""


_request_decoder: Final = msgspec.json.Decoder(_Request)
_answer_decoder: Final = msgspec.json.Decoder(_Answer)


class Uploader:
    """The store's side of the uploading process. For one thread at a time.

    Args:
        upload: The bucket, and which checkpoints are uploaded.

    Attributes:
        num_failed: Number of uploads that failed since the last one that succeeded.
    """

    def __init__(self, upload: Upload) -> None:
        self._command = child_command(__name__, "main", upload.url, str(upload.every), str(upload.keep or 0))
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._pending = Counter[int]()
        self._received = b""
        self.num_failed = 0
        close_in_children(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket is this object's own. Forked children close it (``runtime.children``)."""
        return self._connection is not None and candidate.fileno() == self._connection.fileno()

    def request(self, step: int, location: str) -> None:
        """Upload a complete checkpoint, unless a newer one follows before its turn. Starts the process if necessary.

        Raises:
            OSError: The process cannot be started, or does not read its requests.
        """
        self._receive()
        if self._connection is None:
            self._start()
        assert self._connection is not None, "it was just connected"
        try:
            self._connection.sendall(msgspec.json.encode(_Request(step, location)) + b"\n")
        except OSError:
            self._end()
            raise
        self._pending[step] += 1

    def pending(self) -> frozenset[int]:
        """Return the steps whose files the process may still read."""
        self._receive()
        return frozenset(self._pending)

    def close(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded. Logs a warning if that takes longer than ``timeout_s``."""
        if self._connection is None:
            return
        with contextlib.suppress(OSError):
            # The process sees the end, even if a forked child of this process still has the socket.
            self._connection.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._pending:
                deadline_s = min(deadline_s, time.monotonic() + _END_S)
            if not self._receive(min(left_s, _END_S)):
                return
        if self._pending:
            # The process goes on without this one.
            logger.warning("the upload of the steps %s is still running", sorted(self._pending))
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _start(self) -> None:
        with making_socket:
            ours, theirs = socket.socketpair()
            self._connection = ours
        ours.settimeout(_SEND_S)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env=child_environment(),
                    start_new_session=True,
                )
        except BaseException:
            self._connection = None
            ours.close()
            raise

    def _receive(self, wait_s: float = 0.0) -> bool:
        """Note the answers that have arrived. Return whether the process is still connected."""
        while (connection := self._connection) is not None and select.select([connection], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                received = connection.recv(_MAX_ANSWER_BYTES)
                *lines, self._received = (self._received + received).split(b"\n")
                for line in lines:
                    self._note(_answer_decoder.decode(line))
            except (OSError, msgspec.DecodeError):
                received = b""
            if not received:
                self._end()
        return self._connection is not None

    def _note(self, answer: _Answer) -> None:
        self._pending[answer.step] -= 1
        self._pending += Counter()  # drops those without a request
        if answer.error:
            self.num_failed += 1
            text = "step %d could not be uploaded (%d in a row): %s"
            logger.warning(text, answer.step, self.num_failed, answer.error)
        else:
            self.num_failed = 0

    def _end(self) -> None:
        """Close the connection to a process that has exited or does not answer. The next request starts another one."""
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        self._received = b""
        if connection is not None:
            connection.close()
        status: int | None = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_END_S)
        if self._pending:
            self.num_failed += 1
            logger.warning(
                "the uploading process has exited with status %s; the bucket may lack the steps %s",
                status,
                sorted(self._pending),
            )
        self._pending.clear()


class _Requests:
    """The newest request that waits. Answers a request that a newer one replaces. Thread-safe.

    Args:
        descriptor: The socket to the store.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = SafeCondition()
        self._waiting: _Request | None = None
        self._is_over = False

    def read(self) -> None:
        """Read requests from the standard input until its end."""
        try:
            for line in sys.stdin.buffer:
                request = _request_decoder.decode(line)
                with self._changed:
                    replaced, self._waiting = self._waiting, request
                    self._changed.notify()
                if replaced is not None:
                    self.answer(replaced.step)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify()

    def next(self) -> _Request | None:
        """Wait for a request, and return it; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_over)
            request, self._waiting = self._waiting, None
            return request

    def answer(self, step: int, error: str = "") -> None:
        """Report the outcome of a request, unless the trainer has exited."""
        # An error may name a file whose name is no text.
        text = error[:2000].encode(errors="replace").decode()
        with contextlib.suppress(OSError):
            os.write(self._descriptor, msgspec.json.encode(_Answer(step, text)) + b"\n")


def main() -> None:
    """Run the uploading process."""
    os.nice(_NICENESS)
    # Ignore an interrupt from the terminal: the trainer decides when uploads end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    url, every, keep = sys.argv[1:]
    upload = Upload(url, every=int(every), keep=int(keep) or None)
    requests = _Requests(os.dup(1))
    # The output of libraries must not reach the store.
    os.dup2(2, 1)
    LazyThread(requests.read, "ft-transport-requests").start()
    root: CheckpointRoot | None = None
    copier: Copier | None = None
    try:
        while (request := requests.next()) is not None:
            try:
                if root is None or copier is None:
                    root = root_at(upload.url, "step")
                    root.claim("the uploads of a CheckpointStore", _CLAIM_S)
                    root.recover()
                    # The list of files is copied as it is, with its signature, which a load verifies.
                    copier = Copier(root, Trust(None, "", accepts_unsigned=True), _RETRY_S)
                _upload(request, root, copier, upload)
            except Exception as error:
                requests.answer(request.step, f"{type(error).__name__}: {error}")
                if root is not None and isinstance(error, CheckpointInUseError):
                    # The next request claims the bucket again.
                    root.release()
                    root = None
            else:
                requests.answer(request.step)
    finally:
        if root is not None:
            root.release()


def _upload(request: _Request, root: CheckpointRoot, copier: Copier, upload: Upload) -> None:
    before = [number for number in root.numbers() if number <= request.step]
    if before and 0 < request.step - before[-1] < upload.every:
        return
    copier.copy(StoredCheckpoint(request.step, request.location), overwrite=True)
    if upload.keep is not None:
        older = [number for number in before if number < request.step]
        for number in older[: max(0, len(older) - (upload.keep - 1))]:
            root.delete(root.retire(number))
