"""The trainer's side of a writer process: the messages between them, and the class that starts and ends the process.

The messages go over a pair of Unix sockets: first the length (8 bytes, big-endian), then as many bytes of msgpack. If a
request has snapshots, their descriptors are sent together with the length (``SCM_RIGHTS``). The writer answers each
request once, in order.
"""

from __future__ import annotations

import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.manifest import FileEntry, HashName
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.coordination.votes import Failure, rebuild
from ft_transport.errors import WriterFailedError
from ft_transport.runtime.children import child_command, child_environment, close_in_children, making_socket
from ft_transport.runtime.regular_files import PRIVATE_UMASK

MAX_DESCRIPTORS: Final = 2
_LENGTH_BYTES: Final = 8


class Take(Struct, tag=True):
    """Map the snapshots of a new state, and unmap the previous ones. A descriptor for each part comes with the message.

    Attributes:
        rank: The rank whose state it is.
        starts: Offset of each part's safetensors file in its memory file.
        num_bytes: Length of each part's safetensors file.
        hash_name: Hash function for the digests of written files.
    """

    rank: int
    starts: tuple[int, ...]
    num_bytes: tuple[int, ...]
    hash_name: HashName


class Drop(Struct, tag=True):
    """Unmap the snapshots. Any message that arrives during a `Write` or a `Reread` aborts that request."""


class Plan(Struct, tag=True):
    """Divide the work among all ranks. ``headers`` has the snapshot headers of each rank, one for each part."""

    headers: tuple[tuple[bytes, ...], ...]
    consolidated: str | None


class Create(Struct, tag=True):
    """Create the consolidated files of the plan."""

    directory: str


class Reread(Struct, tag=True):
    """Read and digest files that several ranks have written together."""

    directory: str
    names: tuple[str, ...]


class Digest(Struct, tag=True):
    """Return the digests of these items."""

    items: tuple[int, ...]


class Compare(Struct, tag=True):
    """Compare the items of all ranks by digest. ``digests`` has, for each rank, 8 bytes for each compared item."""

    digests: tuple[bytes, ...]


class Write(Struct, tag=True):
    """Write the files of this rank, as the plan says.

    Attributes:
        location: Location of the new checkpoint (``files``).
        plan: The work of this rank.
        last: Location of the last checkpoint, with which the new one may share data files; empty if there is none.
    """

    location: str
    plan: RankPlan
    last: str


class Describe(Struct, tag=True):
    """Write the metadata for DCP, and return the encoded list of all files.

    Attributes:
        location: Location of the new checkpoint (``files``).
        step: The step of the checkpoint.
        local_keys: Top-level keys of the state whose values are rank-local.
        written: Each rank's answer to `Write`, encoded.
        reread: Each rank's answer to `Reread`, encoded; empty without consolidated files.
        job: Name of the run that will sign the list; empty without a signature.
    """

    location: str
    step: int
    local_keys: tuple[str, ...]
    written: tuple[bytes, ...]
    reread: tuple[bytes, ...]
    job: str


class Taken(Struct, tag=True):
    """The answer to `Take`: digests of the structure of the state, and of the values in its shared part."""

    structure: int
    values: int


class Bytes(Struct, tag=True):
    """The answer to `Digest` and `Describe`."""

    content: bytes


class RankPlans(Struct, tag=True):
    """The answer to `Plan`: the plan of each rank."""

    plans: tuple[RankPlan, ...]


class Written(Struct, tag=True):
    """The answer to `Write` and `Reread`.

    Attributes:
        files: The files of the rank in the directory: data files, shared or written, then the description of the rank;
            or the files that were digested.
        places: The place of each item of the plan, then of each value: index in ``files``, offset and length.
        shared: The objects of data files that belong to other checkpoints, by file name; empty in a directory.
    """

    files: tuple[FileEntry, ...]
    places: tuple[tuple[int, int, int], ...]
    shared: dict[str, str]


class Done(Struct, tag=True):
    """The answer to a request that succeeded and returns nothing; also sent when a new writer process is ready."""


class Failed(Struct, tag=True):
    """The answer to a request that failed."""

    failure: Failure


WriterRequest: TypeAlias = Take | Drop | Plan | Create | Reread | Digest | Compare | Write | Describe
WriterAnswer: TypeAlias = Taken | Bytes | RankPlans | Written | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(WriterRequest)
_answer_decoder: msgspec.msgpack.Decoder[WriterAnswer] = msgspec.msgpack.Decoder(WriterAnswer)


def send(connection: socket.socket, message: WriterRequest | WriterAnswer, descriptors: Sequence[int] = ()) -> None:
    """Send a message, and with it the descriptors of snapshots if there are any.

    Raises:
        OSError: The peer has closed the connection.
    """
    body = _encoder.encode(message)
    length = len(body).to_bytes(_LENGTH_BYTES, "big")
    if descriptors:
        # The kernel accepts so few bytes in one call.
        socket.send_fds(connection, [length], list(descriptors))
    else:
        connection.sendall(length)
    connection.sendall(body)


def receive_request(connection: socket.socket) -> tuple[WriterRequest, list[int]] | None:
    """Receive a request and its descriptors, which the caller must close. Return ``None`` if the connection was closed.

    Raises:
        OSError: The connection broke.
    """
    length, descriptors = _receive_length(connection)
    if not length:
        return None
    return _request_decoder.decode(_receive(connection, int.from_bytes(length, "big"))), descriptors


def receive_answer(connection: socket.socket) -> WriterAnswer:
    """Receive the answer of the writer process.

    Raises:
        EOFError: The writer has exited.
        OSError: The connection broke.
    """
    length, _ = _receive_length(connection)
    if not length:
        raise EOFError("the writer closed its connection")
    return _answer_decoder.decode(_receive(connection, int.from_bytes(length, "big")))


def _receive_length(connection: socket.socket) -> tuple[bytes, list[int]]:
    length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, MAX_DESCRIPTORS)
    if length and len(length) < _LENGTH_BYTES:
        length += _receive(connection, _LENGTH_BYTES - len(length))
    return length, descriptors


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection ended in the middle of a message")
        view = view[count:]
    return bytes(received)


_TICK_S: Final = 0.1
_CANCEL_S: Final = 10.0
_END_S: Final = 5.0
_COMMAND: Final = child_command("ft_transport.checkpoint.writer", "main")


class WriterProcess:
    """Starts a writer process, sends it requests, and ends it.

    Any thread may call `is_alive`. Only one thread at a time may call the other methods.

    Args:
        is_private: Whether only the owner may read the written files. Otherwise the umask decides.

    Attributes:
        number: Number of processes started so far, which identifies the running one.
        last: Location of the last checkpoint to which the running process has written; empty if there is none.
    """

    def __init__(self, *, is_private: bool = False) -> None:
        self._umask = PRIVATE_UMASK if is_private else -1
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.number = 0
        self.last = ""
        close_in_children(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket is this object's own. Forked children close it (``runtime.children``)."""
        return self._connection is not None and candidate.fileno() == self._connection.fileno()

    @property
    def process_id(self) -> int | None:
        """The ID of the process; ``None`` before `start` and after `close`."""
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self, timeout_s: float) -> None:
        """End an earlier process, start a new one, and wait until it has imported its modules.

        Raises:
            WriterFailedError: The process could not be started, or was not ready within ``timeout_s`` seconds.
        """
        self.close()
        self.last = ""
        with making_socket:
            ours, theirs = socket.socketpair()
            self._connection = ours
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    # One thread, if a value makes the writer import torch.
                    env=child_environment() | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                    umask=self._umask,
                )
        except OSError as error:
            self.close()
            raise WriterFailedError(f"expected the writer process {_COMMAND} to start: {error}") from error
        self.number += 1
        self._answer(time.monotonic() + timeout_s, "to be ready", lambda: None)

    def call(
        self,
        request: WriterRequest,
        descriptors: Sequence[int] = (),
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> WriterAnswer:
        """Send a request to the writer process, and return its answer.

        Args:
            request: The request.
            descriptors: Descriptors of snapshots that the request refers to.
            timeout_s: Seconds after which the process counts as stuck, and is killed.
            check: Called repeatedly while waiting. If it raises an error, the process aborts the request, and this
                method raises the same error.

        Raises:
            WriterFailedError: The process died, or did not answer in time.
            Exception: The error with which the request failed in the process.
        """
        deadline_s = time.monotonic() + timeout_s
        what = f"to answer {type(request).__name__}"
        self._send(request, descriptors, what, deadline_s)
        try:
            answer = self._answer(deadline_s, what, check)
        except WriterFailedError:
            raise
        except BaseException:
            self._cancel()
            raise
        if isinstance(answer, Failed):
            raise rebuild(answer.failure)
        return answer

    def close(self) -> None:
        """End the process. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _send(self, request: WriterRequest, descriptors: Sequence[int], what: str, deadline_s: float) -> None:
        if self._connection is None:
            raise WriterFailedError(f"expected a writer process {what}, but none is running")
        try:
            self._connection.settimeout(max(deadline_s - time.monotonic(), _TICK_S))
            send(self._connection, request, descriptors)
        except OSError as error:  # a timeout is an OSError
            raise self._died(what) from error

    def _answer(self, deadline_s: float, what: str, check: Callable[[], None]) -> WriterAnswer:
        connection = self._connection
        assert connection is not None, "the process was started"
        while not select.select([connection], [], [], _TICK_S)[0]:
            if time.monotonic() > deadline_s:
                if self._process is not None:
                    self._process.kill()
                raise self._died(f"{what} in time")
            check()
        try:
            connection.settimeout(max(deadline_s - time.monotonic(), _TICK_S))
            return receive_answer(connection)
        except (OSError, EOFError) as error:
            raise self._died(what) from error

    def _cancel(self) -> None:
        """Abort the running request by a `Drop`, and read the answers to both requests, so that none is left."""
        try:
            deadline_s = time.monotonic() + _CANCEL_S
            self._send(Drop(), (), "to give up", deadline_s)
            for _ in range(2):
                self._answer(deadline_s, "to give up", lambda: None)
        except WriterFailedError:
            self.close()

    def _died(self, what: str) -> WriterFailedError:
        process = self._process
        status = _end(process) if process is not None else None
        number = process.pid if process is not None else None
        return WriterFailedError(f"expected the writer process {number} {what}, it ended with status {status}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for a process to exit, and kill it if it does not. Return its exit status; ``None`` if it still runs."""
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        # The process hangs in a system call, for example on a file server that does not answer. The kernel ends it when
        # that call returns.
        return None
