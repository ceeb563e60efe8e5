"""Transports that speak TLS on the loopback, and a tap on the wire between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

from certificates import HOST, Issued, client_context
from proxy import Proxy, proxied
from transport_settings import settings_of

from ft_transport import HTTPTransport

TIMEOUT = timedelta(seconds=20)


@contextmanager
def transport(
    issued: Issued | None, *, num_connections: int = 2, same_host: bool = False, **settings: Any
) -> Iterator[HTTPTransport[Any]]:
    """One that listens at 127.0.0.1, and speaks TLS if it is given a certificate; data goes through the network."""
    tls = issued.files if issued is not None else None
    made: HTTPTransport[Any] = HTTPTransport(
        TIMEOUT,
        num_connections,
        settings=settings_of(host="127.0.0.1", tls=tls, same_host=same_host, **settings),
    )
    try:
        yield made
    finally:
        made.shutdown()


class Tap:
    """All that has passed on the wire, in both directions."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.content = bytearray()
        proxy.watch = proxy.watch_answers = self.content.extend

    def address(self, of: HTTPTransport[Any]) -> str:
        """Of the proxy, as that transport would tell its own."""
        return of.metadata().replace(str(port_of(of)), str(self.proxy.port))


@contextmanager
def tapped(port: int) -> Iterator[Tap]:
    with proxied(port) as proxy:
        yield Tap(proxy)


def port_of(transport: HTTPTransport[Any]) -> int:
    return int(transport.metadata().split(":")[2].split("/")[0])


def connection(port: int, issued: Issued | None) -> HTTPConnection:
    """One of other software."""
    if issued is None:
        return HTTPConnection(HOST, port, timeout=20)
    return HTTPSConnection(HOST, port, timeout=20, context=client_context(issued))
