"""Jobs that are watched, and processes that answer as they like."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ft_transport.cli.job import KnownJob, KnownMember
from ft_transport.telemetry.process_state import ManagerStatus, ProcessState


def job_of(**addresses: str) -> Callable[[], KnownJob]:
    """A job whose members are at these addresses, by name."""
    members = tuple(
        KnownMember(name=name, replica_id=f"{name}:1", addresses=(address,), step=3)
        for name, address in addresses.items()
    )
    return lambda: KnownJob(members=members, lighthouse="http://127.0.0.1:1", is_lighthouse_read=True)


def answer_of(body: bytes, *, length: int | None = None) -> bytes:
    """A whole answer of HTTP; its length may be a lie."""
    length = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % length + body


def encoded_state(**fields: Any) -> bytes:
    return msgspec.json.encode(ProcessState(manager=ManagerStatus(**fields), unix_s=1.0))


@contextmanager
def listening(respond: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A peer that answers each connection as it likes, on one thread; yields its address as members tell theirs."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def serve() -> None:
        while not ended.is_set():
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            with connected:
                connected.settimeout(5)
                try:
                    connected.recv(65536)
                    respond(connected, ended)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/checkpoint/"
    finally:
        ended.set()
        thread.join()
        listener.close()
