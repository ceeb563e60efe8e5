"""TLS: a state moves to a fresh process encrypted, by us and by a bare loop, and by us in the clear.

The bare loop sends with ``SSLSocket.sendall`` and receives with ``SSLSocket.recv_into``, over as many connections, with
the same certificates and the same cipher.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.fetch import COLD, VERIFIED, FetchVariant, measure
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Verdict
from benchmarks.states import State, StateSpec
from benchmarks.transports import Address, Fetch, Receiver, prepare_ours, serve_ours
from ft_transport import TLSFiles
from ft_transport.cli.bench import NUM_CONNECTIONS, RANGE, READ_BYTES
from ft_transport.credentials import Certificates

_HOST: Final = "127.0.0.1"


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    with tempfile.TemporaryDirectory(prefix="ft-transport-tls-") as directory:
        files = _issue(Path(directory))
        ours = FetchVariant(
            f"ft_transport, TLS, in place, {NUM_CONNECTIONS} connections, verified",
            "ours",
            partial(serve_ours, tls=files),
            partial(prepare_ours, tls=files),
        )
        unverified = FetchVariant(
            f"ft_transport, TLS, in place, {NUM_CONNECTIONS} connections, unverified",
            "ours",
            ours.serve,
            partial(prepare_ours, tls=files, verify=False),
        )
        bare = FetchVariant(
            f"bare SSLSocket.sendall → recv_into, {NUM_CONNECTIONS} connections",
            "ceiling",
            partial(_serve_bare, files),
            partial(_prepare_bare, files),
        )
        for name in options.states:
            group = measure("tls", StateSpec(name, options.scale), (ours, unverified, bare, VERIFIED), options)
            group.notes.append(f"TLS with {_cipher(files)}")
            group.verdicts = [
                Verdict.at_least("TLS, verified / bare TLS loop", group.ratio(ours, bare, COLD), 0.8),
                Verdict.at_least("TLS, unverified / bare TLS loop", group.ratio(unverified, bare, COLD), 0.8),
                Verdict("TLS / plain, verified", group.ratio(ours, VERIFIED, COLD), None, "at least"),
            ]
            yield group


def _issue(directory: Path) -> TLSFiles:
    """Files that the sender and its receivers share."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert(_HOST)
    names = {name: str(directory / f"{name}.pem") for name in ("certificate", "key", "authority")}
    for index, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(names["certificate"], append=index > 0)
    issued.private_key_pem.write_to_path(names["key"])
    authority.cert_pem.write_to_path(names["authority"])
    return TLSFiles(**names)


def _serve_bare(files: TLSFiles, state: State, num_bytes: int, stack: contextlib.ExitStack) -> Address:
    """Sends any bytes, as many as the state has, a thread per connection."""
    del state
    data = memoryview(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy())
    context = Certificates(files).for_server()
    listener = stack.enter_context(socket.create_server((_HOST, 0)))

    def send(connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError), context.wrap_socket(connected, server_side=True) as encrypted:
            while len(request := encrypted.recv(RANGE.size)) == RANGE.size:
                start, end = RANGE.unpack(request)
                for position in range(start, end, READ_BYTES):
                    encrypted.sendall(data[position : min(position + READ_BYTES, end)])

    def accept() -> None:
        with contextlib.suppress(OSError):  # The listener was closed.
            while True:
                threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    stack.callback(acceptor.join)
    # close() alone does not wake the thread that is in accept().
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    address = str(listener.getsockname()[1])
    return lambda _num_fetches: address


def _prepare_bare(files: TLSFiles, receiver: Receiver) -> Fetch:
    destination = memoryview(torch.full((receiver.num_bytes,), 1, dtype=torch.uint8).numpy())
    context = Certificates(files).for_client()

    def receive(part: int) -> None:
        position = len(destination) * part // NUM_CONNECTIONS
        end = len(destination) * (part + 1) // NUM_CONNECTIONS
        with _connect(context, int(receiver.address)) as encrypted:
            encrypted.sendall(RANGE.pack(position, end))
            while position < end:
                got = encrypted.recv_into(destination[position : min(position + READ_BYTES, end)])
                if not got:
                    raise ConnectionError(f"expected {end - position} more bytes, the sender closed the connection")
                position += got

    def fetch() -> None:
        with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
            list(threads.map(receive, range(NUM_CONNECTIONS)))

    return fetch


def _connect(context: ssl.SSLContext, port: int) -> ssl.SSLSocket:
    return context.wrap_socket(socket.create_connection((_HOST, port)), server_hostname=_HOST)


def _cipher(files: TLSFiles) -> str:
    """What both sides choose."""
    with contextlib.ExitStack() as stack:
        address = _serve_bare(files, {}, 1, stack)(1)
        with _connect(Certificates(files).for_client(), int(address)) as encrypted:
            name, version, _ = encrypted.cipher() or ("nothing", "", 0)
            return f"{version}, {name}, {ssl.OPENSSL_VERSION}"


BENCHMARK: Final = Benchmark(
    name="tls",
    question="What does TLS cost a fetch?",
    run=run,
    states=("big",),
    default=Size(scale=0.4, num_samples=7),
    misses={
        "bare TLS loop": "Encryption takes both cores, and the digest needs one of them as well.",
    },
)
