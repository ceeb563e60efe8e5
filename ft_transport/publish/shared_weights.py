"""Receives a version once per host, for all workers of an engine.

With tensor parallelism, each worker reads its part of every tensor, so each worker would fetch the whole version and
keep it in memory. Instead one worker on each host, the leader, fetches the version into memory that the other workers
map.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from ft_transport.http.client.fetch_settings import FetchHandle
from ft_transport.publish.received_weights import ReceivedWeights
from ft_transport.state.prefaulted import PrefaultedMemory
from ft_transport.state.tensors import DTYPES_BY_NAME, name_of

_NAME: Final = "ft-transport-weights"
_TOKEN_BYTES: Final = 16
_ALIGN_BYTES: Final = 64

Gather: TypeAlias = Callable[[bytes], Sequence[bytes]]
"""Returns the arguments of all workers, in the order of their ranks. All workers call it at the same time."""


class _Block(msgspec.Struct, frozen=True):
    """A block of a leader's memory: path, device and inode of its file, and its length in bytes."""

    path: str
    device: int
    inode: int
    num_bytes: int


class _Place(msgspec.Struct, frozen=True):
    """The place of a tensor's elements: index of the block, and the offset in bytes."""

    block: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class _Description(msgspec.Struct, frozen=True):
    """The blocks of a leader's memory, and the place of each tensor."""

    blocks: list[_Block]
    tensors: dict[str, _Place]


_decoder: Final = msgspec.json.Decoder(_Description)


class HostMemory(PrefaultedMemory):
    """Memory for received tensors that other processes of the same user can map.

    The memory belongs to files without a name (``memfd_create``, Linux 3.17). So it needs no space in ``/dev/shm``,
    which containers limit to 64 MB, and nothing is left behind when the processes end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: list[tuple[weakref.ref[mmap.mmap], int]] = []

    def take(self, num_bytes: int) -> mmap.mmap:
        """Return a new block. Its file is closed when no tensor uses the block any more."""
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, num_bytes)
            block = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(block, os.close, descriptor)
        self._files.append((weakref.ref(block), descriptor))
        return block

    def describe(self, tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, mmap.mmap | None]:
        """Return a description of received tensors, with which other processes can map them.

        Returns:
            The description, and a block with row-major copies of those tensors that are not row-major or not in this
            memory: `Restore` keeps small tensors apart. The caller keeps this block as long as others may map it.
        """
        self._files = [each for each in self._files if each[0]() is not None]
        others = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.numel() and (self._find(tensor) is None or not tensor.is_contiguous())
        }
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in others.values())
        copies = self.take(num_bytes) if num_bytes else None
        placed = dict(tensors)
        offset = 0
        for name, tensor in others.items():
            placed[name] = torch.frombuffer(copies, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            placed[name].view(tensor.shape).copy_(tensor)
            offset += _aligned(tensor.nbytes)
        places = {}
        for name, tensor in placed.items():
            block, at = self._find(tensor) or (0, 0)  # a tensor without elements
            places[name] = _Place(block, at, name_of(tensor.dtype), tuple(tensors[name].shape))
        blocks = []
        for _, descriptor in self._files:
            status = os.fstat(descriptor)
            blocks.append(_Block(_path_of(descriptor), status.st_dev, status.st_ino, status.st_size))
        return msgspec.json.encode(_Description(blocks, places)), copies

    def _find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the index of the block with a tensor's elements, and their offset in bytes; ``None`` without one."""
        for at, (reference, _) in enumerate(self._files):
            if (block := reference()) is not None:
                offset = tensor.data_ptr() - ctypes.addressof(ctypes.c_char.from_buffer(block))
                if 0 <= offset < len(block):
                    return at, offset
        return None


class SharedWeights:
    """The version that was last received for the workers of an engine. Not thread-safe.

    All workers call `fetch` at the same time.

    Args:
        received: Fetches versions into ``memory``, if this worker is a leader.
        memory: The memory of ``received``.
        rank: Rank of this worker.
        gather: Exchanges values with the other workers.

    Attributes:
        version: The version of the tensors. ``None`` before the first version, and after a failed fetch.
    """

    def __init__(self, received: ReceivedWeights, memory: HostMemory, rank: int, gather: Gather) -> None:
        self._received = received
        self._memory = memory
        self._rank = rank
        self._gather = gather
        self._leader: int | None = None
        self._copies: mmap.mmap | None = None
        self._description: _Description | None = None
        self.version: int | None = None

    def fetch(self, address: str, version: int) -> None:
        """Receive a version. If that fails, ``version`` is ``None`` on all workers, and the leader raises the error.

        Args:
            address: URL of the transport that serves the version.
            version: Number of the version.

        Raises:
            Exception: An error of `ReceivedWeights.fetch`, on a leader only.
            OSError: This worker cannot map the leader's memory.
        """
        self.version = None
        if self._leader is None:
            self._leader = _leader_of(self._rank, self._gather)
        description = b""
        try:
            if self._leader == self._rank:
                self._received.fetch(address, version, FetchHandle())
                self._copies = None  # the block of the previous version
                description, self._copies = self._memory.describe(self._received.tensors)
        finally:
            # Also after a failure, because the other workers wait.
            description = self._gather(description)[self._leader]
        if description:
            self._description = _decoder.decode(description)
            self.tensors()  # so that a worker that cannot map the memory fails here
            self.version = version

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the version, in host memory, by name.

        The caller may change them: the mapping is private, so neither other workers nor later calls see the changes.
        vLLM's loaders of some models do so (vllm/model_executor/models/plamo2.py).

        Raises:
            OSError: This worker cannot map the leader's memory.
        """
        assert self._description is not None, "a version was fetched"
        blocks = [_map(block) for block in self._description.blocks]
        tensors = {}
        for name, place in self._description.tensors.items():
            dtype, count = DTYPES_BY_NAME[place.dtype], math.prod(place.shape)
            if count:
                flat = torch.frombuffer(blocks[place.block], dtype=dtype, count=count, offset=place.offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(place.shape)
        return tensors


def _map(block: _Block) -> mmap.mmap:
    descriptor = os.open(block.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (block.device, block.inode):
            raise FileNotFoundError(errno.ENOENT, "expected the memory of the leader, got another file", block.path)
        return mmap.mmap(descriptor, block.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _leader_of(rank: int, gather: Gather) -> int:
    """Return the first rank whose memory this worker can map."""
    token = secrets.token_hex(_TOKEN_BYTES)
    descriptor: int | None = None
    offer = ""
    try:
        # Even without a free descriptor, this worker takes part in the exchange: the others wait for it.
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create(_NAME)
            os.write(descriptor, token.encode())
            offer = f"{token} {_path_of(descriptor)}"
        offers = [each.decode().split() for each in gather(offer.encode())]
        first = next((at for at, each in enumerate(offers) if each and _contains(each[1], each[0])), rank)
        # All workers have read the tokens before one of them closes its file. A leader is its own leader.
        return first if int(gather(b"%d" % first)[first]) == first else rank
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _contains(path: str, token: str) -> bool:
    """Return whether a path leads to a file with a token: not if it belongs to another host or container."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(token), 0) == token.encode()
    except OSError:  # a pipe or a socket
        return False
    finally:
        os.close(descriptor)


def _path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
