"""What the trainer's process and its writer process say to each other, over a pair of Unix sockets.

A message is a length, 8 bytes, big-endian, and that many bytes of msgpack. A request that brings snapshots has their
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
    """Take these snapshots, by part, in place of those that you have; one descriptor comes for each.

    ``starts`` says where in its memory file each safetensors file begins, ``num_bytes`` how long it is; ``hash_name``
    what the files that are written of them are digested by.
    """

    rank: int
    starts: tuple[int, ...]
    num_bytes: tuple[int, ...]
    hash_name: HashName


class Cancel(Struct, tag=True):
    """Give up what you are doing, if you are doing anything."""


class Drop(Struct, tag=True):
    """Let go of the snapshots."""


class Plan(Struct, tag=True):
    """Make a plan for all ranks from the headers of their snapshots, by rank and part."""

    headers: tuple[tuple[bytes, ...], ...]
    consolidated: str | None


class Create(Struct, tag=True):
    """Make the consolidated files of the plan, and their index."""

    directory: str


class Reread(Struct, tag=True):
    """Digest files that several ranks have written."""

    directory: str
    names: tuple[str, ...]


class Digest(Struct, tag=True):
    """Digest these items."""

    items: tuple[int, ...]


class Compare(Struct, tag=True):
    """Find out whether ranks have diverged. ``digests`` by rank, 8 bytes each."""

    digests: tuple[bytes, ...]


class Write(Struct, tag=True):
    """Write this rank's part of the plan into a directory."""

    directory: str
    plan: RankPlan


class Describe(Struct, tag=True):
    """Write what DCP reads, and answer with the list of files; what the ranks have written is in ``written``."""

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
    """What was asked for, as bytes; several where there are several."""

    parts: tuple[bytes, ...]


class RankPlans(Struct, tag=True):
    """What each rank writes."""

    plans: tuple[RankPlan, ...]


class Written(Struct, tag=True):
    """The files that a rank has written, and where in its data file everything is: offset and length."""

    files: tuple[FileEntry, ...]
    places: tuple[tuple[int, int], ...]


class Done(Struct, tag=True):
    """It is done."""


class Failed(Struct, tag=True):
    """It failed."""

    failure: Failure


WriterRequest: TypeAlias = Take | Cancel | Drop | Plan | Create | Reread | Digest | Compare | Write | Describe
WriterAnswer: TypeAlias = Taken | Bytes | RankPlans | Written | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(WriterRequest)
_answer_decoder: msgspec.msgpack.Decoder[WriterAnswer] = msgspec.msgpack.Decoder(WriterAnswer)
_written_decoder = msgspec.msgpack.Decoder(Written)


def encode_written(written: Written) -> bytes:
    """For the way to the first rank."""
    return _encoder.encode(written)


def decode_written(encoded: bytes) -> Written:
    """The inverse of `encode_written`."""
    return _written_decoder.decode(encoded)


def send(connection: socket.socket, message: WriterRequest | WriterAnswer, descriptors: Sequence[int] = ()) -> None:
    """Sends a message.

    Raises:
        OSError: The other side is gone.
    """
    body = _encoder.encode(message)
    length = len(body).to_bytes(_LENGTH_BYTES, "big")
    if descriptors:
        # On a stream socket all of a few bytes are taken at once.
        socket.send_fds(connection, [length], list(descriptors))
    else:
        connection.sendall(length)
    connection.sendall(body)


def receive_request(connection: socket.socket) -> tuple[WriterRequest, list[int]] | None:
    """The next request and the descriptors that came with it, which are the caller's; ``None`` if there is none.

    Raises:
        OSError: The connection broke.
    """
    length, descriptors = _receive_length(connection)
    if not length:
        return None
    return _request_decoder.decode(_receive(connection, int.from_bytes(length, "big"))), descriptors


def receive_answer(connection: socket.socket) -> WriterAnswer:
    """The next answer.

    Raises:
        EOFError: The writer is gone.
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
