"""``ft-transport bench``: measures a clone and a fetch on this machine, and the limits of the hardware for both.

The limits are the rates of a memory copy and of a bare ``sendfile`` → ``recv_into`` loop. The project's benchmarks use
the same functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from ft_transport.cli.output import escape, megabytes
from ft_transport.errors import TransportError
from ft_transport.runtime.children import child_command, child_environment
from ft_transport.runtime.signal_safe import SafeThread
from ft_transport.runtime.threads import SafeExecutor

if TYPE_CHECKING:
    import torch

    from ft_transport import HTTPTransport

_TENSOR_BYTES: Final = 4 << 20
_QUICK_BYTES: Final = 64 << 20
_RECEIVER_S: Final = 45.0
_MAX_ERROR: Final = 2000
_STEP: Final = 1
_COPY: Final = "memory copy"
_BARE: Final = "bare socket loop"
NUM_CONNECTIONS: Final = 4
READ_BYTES: Final = 1 << 20
RANGE: Final = struct.Struct("<QQ")


_samples_decoder: Final = msgspec.json.Decoder(dict[str, list[float]])


class BenchFailedError(TransportError):
    """A rate could not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rates that one benchmark measured, in bytes per second.

    Attributes:
        name: Name of the benchmark.
        ceiling: Name of the benchmark that measures the hardware's limit; empty if this one measures a limit.
        median: Median rate of all rounds.
        low: Rate of the slowest round.
        high: Rate of the fastest round.
        num_rounds: Number of rounds; fewer than requested if the rounds took too long.
    """

    name: str
    ceiling: str
    median: float
    low: float
    high: float
    num_rounds: int


def bench_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Use an eighth of the size and fewer rounds: takes a few seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a clone with a memory copy, and a fetch over the loopback with a bare sendfile → recv_into loop.

    The measurements alternate over several rounds, in memory that is already allocated. A separate process receives the
    data in place, over 4 connections. Takes less than a minute. Exits with 1 if a rate could not be measured.
    """
    num_bytes, num_rounds = (_QUICK_BYTES, 3) if quick else (512 << 20, 7)
    rates = measure(num_bytes, num_rounds)
    if as_json:
        result = {"num_bytes": num_bytes, "num_connections": NUM_CONNECTIONS, "rates": rates}
        typer.echo(msgspec.json.encode(result))
        return
    by_name = {rate.name: rate for rate in rates}
    typer.echo(
        f"{megabytes(num_bytes)} in tensors of {megabytes(_TENSOR_BYTES)}, median of {rates[-1].num_rounds} (min–max)"
    )
    for rate in rates:
        spread = f"{rate.low / 1e9:.2f}–{rate.high / 1e9:.2f}"
        ceiling = by_name.get(rate.ceiling)
        share = f"{rate.median / ceiling.median:.2f} of the {ceiling.name}" if ceiling is not None else "the ceiling"
        typer.echo(f"  {rate.name:<20} {rate.median / 1e9:6.2f} GB/s ({spread})  {share}")


def measure(num_bytes: int, num_rounds: int) -> list[Rate]:
    """Measure and return all rates: memory copy, clone, bare socket loop, fetches.

    Raises:
        BenchFailedError: The receiving process failed, or took too long.
    """
    from ft_transport import HTTPTransport, Limits, TransportSettings

    settings = TransportSettings(
        host="127.0.0.1", advertise="127.0.0.1", same_host=False, limits=Limits(max_snapshots=1), tls=None, token=None
    )
    transport: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=_RECEIVER_S), settings=settings)
    try:
        state = _state_of(num_bytes)
        samples = _clone_samples(transport, state, num_rounds)
        best = min(samples["copy_"], samples["memmove"], key=statistics.median)
        rates = [_rate(_COPY, "", best, num_bytes), _rate("clone", _COPY, samples["clone"], num_bytes)]
        transport.send_checkpoint([], _STEP, state, timedelta(seconds=_RECEIVER_S))
        samples = _fetch_samples(transport.metadata(), num_bytes, num_rounds)
        return rates + [_rate(name, "" if name == _BARE else _BARE, samples[name], num_bytes) for name in samples]
    finally:
        transport.shutdown()


def _rate(name: str, ceiling: str, seconds: list[float], num_bytes: int) -> Rate:
    rates = [num_bytes / each for each in seconds]
    return Rate(
        name=name,
        ceiling=ceiling,
        median=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        num_rounds=len(rates),
    )


def _clone_samples(transport: HTTPTransport[Any], state: dict[str, Any], num_rounds: int) -> dict[str, list[float]]:
    from ft_transport.state.snapshot import Taking

    def clone() -> None:
        snapshot = transport.server.take(Taking(step=0, state=state))
        snapshot.copy_deferred()
        snapshot.abandon()

    plain = MemoryCopy(list(state.values()))
    try:
        ways = {"copy_": plain.torch_copy, "memmove": plain.memmove, "clone": clone}
        return _time_in_turn(ways, num_rounds, within_s=8.0)
    finally:
        plain.close()


def _fetch_samples(url: str, num_bytes: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each fetch took, by kind of fetch. A separate process receives the data."""
    with bare_sender(num_bytes) as port:
        command = child_command(__name__, _receive.__name__, url, *map(str, (port, num_bytes, num_rounds)))
        try:
            done = subprocess.run(
                command, capture_output=True, env=child_environment(), timeout=_RECEIVER_S, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchFailedError(f"the receiving process failed: {error}; try --quick") from error
    if done.returncode:
        output = escape(done.stderr.decode("utf-8", "replace")[-_MAX_ERROR:], _MAX_ERROR)
        raise BenchFailedError(f"the receiving process ended with exit code {done.returncode}: {output}")
    return _samples_decoder.decode(done.stdout)


def _receive() -> None:
    """Run as the receiving process: run each kind of fetch in turn, and print how long each fetch took, as JSON."""
    from ft_transport import HTTPTransport, TransportSettings

    url, port, num_bytes, num_rounds = sys.argv[1], *map(int, sys.argv[2:])
    own = _state_of(num_bytes)
    ways: dict[str, Callable[[], object]] = {_BARE: bare_receiver(port, memoryview(bytearray(b"\x01" * num_bytes)))}
    with contextlib.ExitStack() as opened:
        for name, is_verified in (("fetch, not verified", False), ("fetch, verified", True)):
            settings = TransportSettings(host="127.0.0.1", same_host=False, verify=is_verified)
            transport: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=30), settings=settings)
            opened.callback(transport.shutdown)
            ways[name] = partial(transport.fetch, url, _STEP, into=own)
        sys.stdout.buffer.write(msgspec.json.encode(_time_in_turn(ways, num_rounds, within_s=20.0)))


def _time_in_turn(ways: Mapping[str, Callable[[], object]], num_rounds: int, within_s: float) -> dict[str, list[float]]:
    """Call the functions in turn, in several rounds after a warm-up, and return the seconds of each call."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    until_s = time.monotonic() + within_s
    for number in range(num_rounds + 1):
        if number > 1 and time.monotonic() > until_s:
            break
        for name in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
            began_s = time.perf_counter()
            ways[name]()
            if number:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds


def _state_of(num_bytes: int) -> dict[str, Any]:
    """Return a state of ``num_bytes`` in tensors of 4 MiB, whose memory is already allocated."""
    import torch

    return {
        f"layer.{number}": torch.full((_TENSOR_BYTES // 4,), float(number))
        for number in range(num_bytes // _TENSOR_BYTES)
    }


class MemoryCopy:
    """Copies tensors into memory that is already allocated, with ``Tensor.copy_`` or with ``memmove``.

    Args:
        sources: The tensors to copy.
        memory: The destination, a uint8 tensor as large as all sources; ``None`` for a new tensor.
    """

    def __init__(self, sources: Sequence[torch.Tensor], memory: torch.Tensor | None = None) -> None:
        import torch

        self._sources = [source.detach().reshape(-1).view(torch.uint8) for source in sources if source.nbytes]
        sizes = [source.nbytes for source in self._sources]
        # Writing every page allocates the memory.
        self._memory = memory if memory is not None else torch.full((sum(sizes),), 1, dtype=torch.uint8)
        self._targets = list(torch.split(self._memory, sizes))
        self._num_threads = torch.get_num_threads()
        pairs = [
            (target.data_ptr(), source.data_ptr(), source.nbytes)
            for target, source in zip(self._targets, self._sources, strict=True)
        ]
        self._shares = _equal_shares(pairs, self._num_threads)
        self._pool = SafeExecutor(self._num_threads, "ft-transport-ceiling")

    @property
    def memory(self) -> memoryview:
        """The memory into which tensors are copied."""
        return self._memory.numpy().data

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def torch_copy(self) -> None:
        """Copy with ``Tensor.copy_``, tensor by tensor, with all intra-op threads."""
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)

    def memmove(self) -> None:
        """Copy with ``ctypes.memmove``, in as many threads as `torch_copy`."""
        for future in [self._pool.submit(_move_all, share) for share in self._shares]:
            future.result()


def _move_all(share: Sequence[tuple[int, int, int]]) -> None:
    memmove = ctypes.memmove
    for target, source, num_bytes in share:
        memmove(target, source, num_bytes)


def _equal_shares(pairs: Sequence[tuple[int, int, int]], num_shares: int) -> list[list[tuple[int, int, int]]]:
    """Divide the copies into shares of equal size, one for each thread; a share may end inside a tensor."""
    share_bytes = -(-sum(num_bytes for _, _, num_bytes in pairs) // num_shares)
    shares: list[list[tuple[int, int, int]]] = [[]]
    room = share_bytes
    for pair in pairs:
        target, source, num_bytes = pair
        while num_bytes > room:
            shares[-1].append((target, source, room))
            target, source, num_bytes = target + room, source + room, num_bytes - room
            shares.append([])
            room = share_bytes
        shares[-1].append((target, source, num_bytes))
        room -= num_bytes
    return shares


@contextlib.contextmanager
def bare_sender(num_bytes: int, *, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve ``num_bytes`` of random data from a memory file, with one thread per connection; yield the port."""
    descriptor = os.memfd_create("bare-sender")
    listener = socket.create_server((host, 0))
    try:
        block = os.urandom(1 << 20)
        for start in range(0, num_bytes, len(block)):
            os.pwrite(descriptor, block[: num_bytes - start], start)

        def accept() -> None:
            with contextlib.suppress(OSError):  # The listener was closed.
                while True:
                    connected, _ = listener.accept()
                    SafeThread(target=_send_ranges, args=(connected, descriptor), daemon=True).start()

        acceptor = SafeThread(target=accept, daemon=True)
        acceptor.start()
        yield listener.getsockname()[1]
        # close() alone does not wake the thread that waits in accept().
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join()
    finally:
        listener.close()
        os.close(descriptor)


def _send_ranges(connected: socket.socket, descriptor: int) -> None:
    with connected, contextlib.suppress(OSError):
        while len(request := connected.recv(RANGE.size, socket.MSG_WAITALL)) == RANGE.size:
            start, end = RANGE.unpack(request)
            while start < end:
                start += os.sendfile(connected.fileno(), descriptor, start, end - start)


def bare_receiver(port: int, destination: memoryview, *, host: str = "127.0.0.1") -> Callable[[], None]:
    """Return a function that fills ``destination``, in equal parts over parallel connections.

    Each call of the function opens new connections, as a first fetch does.
    """

    def receive(part: int) -> None:
        position = len(destination) * part // NUM_CONNECTIONS
        end = len(destination) * (part + 1) // NUM_CONNECTIONS
        with socket.create_connection((host, port)) as connected:
            connected.sendall(RANGE.pack(position, end))
            while position < end:
                # Waiting for the whole block saves a system call for each partial arrival.
                got = connected.recv_into(
                    destination[position : min(position + READ_BYTES, end)], 0, socket.MSG_WAITALL
                )
                if not got:
                    raise ConnectionError(f"expected {end - position} more bytes, but the sender closed the connection")
                position += got

    def fetch() -> None:
        with SafeExecutor(NUM_CONNECTIONS, "ft-transport-ceiling") as threads:
            list(threads.map(receive, range(NUM_CONNECTIONS)))

    return fetch
