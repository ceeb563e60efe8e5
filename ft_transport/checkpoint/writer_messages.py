"""The messages between the trainer's process and its writer process, over a pair of Unix sockets.

A message is a length, 8 bytes, big-endian, and that many bytes of msgpack. A request with snapshots carries their
descriptors with its length (``SCM_RIGHTS``). The writer answers each request once, in order.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.hashing import HashName
from ft_transport.checkpoint.manifest import FileEntry
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.coordination.votes import Failure

MAX_DESCRIPTORS: Final = 2
_LENGTH_BYTES: Final = 8


class Take(Struct, tag=True):
    """Replace the writer's snapshots by these, by part; the message carries one descriptor for each.

    ``starts`` has the offset of each safetensors file in its memory file, ``num_bytes`` its length; ``hash_name`` is
    the hash function for the files that are written.
    """

    rank: int
    starts: tuple[int, ...]
    num_bytes: tuple[int, ...]
    hash_name: HashName


class Cancel(Struct, tag=True):
    """Abort the current request, if there is one."""


class Drop(Struct, tag=True):
    """Release the snapshots."""


class Plan(Struct, tag=True):
    """Make a plan for all ranks from the headers of their snapshots, by rank and part."""

    headers: tuple[tuple[bytes, ...], ...]
    consolidated: str | None


class Create(Struct, tag=True):
    """Create the consolidated files of the plan, and their index."""

    directory: str


class Reread(Struct, tag=True):
    """Digest files that several ranks have written."""

    directory: str
    names: tuple[str, ...]


class Digest(Struct, tag=True):
    """Digest these items."""

    items: tuple[int, ...]


class Compare(Struct, tag=True):
    """Check whether ranks have diverged. ``digests`` by rank, 8 bytes each."""

    digests: tuple[bytes, ...]


class Write(Struct, tag=True):
    """Write this rank's part of the plan into a directory."""

    directory: str
    plan: RankPlan


class Describe(Struct, tag=True):
    """Write the files that DCP reads, and answer with the list of files; ``written`` has the ranks' own files."""

    directory: str
    step: int
    local_keys: tuple[str, ...]
    written: tuple[bytes, ...]
    reread: tuple[bytes, ...]
    job: str


class Taken(Struct, tag=True):
    """Digests of the snapshots' structure and of the values that all ranks share."""

    structure: int
    values: int


class Bytes(Struct, tag=True):
    """The requested bytes; several pieces if several were requested."""

    parts: tuple[bytes, ...]


class RankPlans(Struct, tag=True):
    """The plan of each rank."""

    plans: tuple[RankPlan, ...]


class Written(Struct, tag=True):
    """The files that a rank has written, and the places of its items and values in its data file: offset and length."""

    files: tuple[FileEntry, ...]
    places: tuple[tuple[int, int], ...]


class Done(Struct, tag=True):
    """The request succeeded."""


class Failed(Struct, tag=True):
    """The request failed."""

    failure: Failure


WriterRequest: TypeAlias = Take | Cancel | Drop | Plan | Create | Reread | Digest | Compare | Write | Describe
WriterAnswer: TypeAlias = Taken | Bytes | RankPlans | Written | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(WriterRequest)
_answer_decoder: msgspec.msgpack.Decoder[WriterAnswer] = msgspec.msgpack.Decoder(WriterAnswer)
_written_decoder = msgspec.msgpack.Decoder(Written)


def encode_written(written: Written) -> bytes:
    """Encode the answer, to be sent to the first rank."""
    return _encoder.encode(written)


def decode_written(encoded: bytes) -> Written:
    """Decode the answer; the inverse of `encode_written`."""
    return _written_decoder.decode(encoded)


def send(connection: socket.socket, message: WriterRequest | WriterAnswer, descriptors: Sequence[int] = ()) -> None:
    """Send a message.

    Raises:
        OSError: The peer has closed the connection.
    """
    body = _encoder.encode(message)
    length = len(body).to_bytes(_LENGTH_BYTES, "big")
    if descriptors:
        # A stream socket accepts a few bytes completely.
        socket.send_fds(connection, [length], list(descriptors))
    else:
        connection.sendall(length)
    connection.sendall(body)


def receive_request(connection: socket.socket) -> tuple[WriterRequest, list[int]] | None:
    """Receive a request and its descriptors, which the caller owns; return ``None`` after the last request.

    Raises:
        OSError: The connection broke.
    """
    length, descriptors = _receive_length(connection)
    if not length:
        return None
    return _request_decoder.decode(_receive(connection, int.from_bytes(length, "big"))), descriptors


def receive_answer(connection: socket.socket) -> WriterAnswer:
    """Receive an answer.

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
