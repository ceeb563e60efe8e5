"""The server's end of TLS: a layer between asyncio's transport and aiohttp's protocol.

asyncio's own TLS does not suffice. A thread that sends a body has to encrypt it with the TLS state of the connection,
which asyncio keeps private. Here, `TLSTransport.lend` passes the TLS state to the thread, and the event loop does not
use it until `TLSTransport.give_back`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from ft_transport.credentials import Certificates
from ft_transport.http.server.logs import PeerLog
from ft_transport.http.tls_channel import MAX_RECORD_BYTES, PLAIN_ALERT, TLSBrokenError, TLSChannel, TLSRefusedError

_HANDSHAKE_TIMEOUT_S: Final = 10.0
_MAX_OUTSIDE: Final = 128
"""Maximum number of connections without a completed handshake; one more aborts the oldest of them."""
_LINGERING_S: Final = 1.0
"""How long a refused connection stays open, so that the peer can receive the alert with the reason."""


class TLSAcceptor:
    """Limits the number of connections without a completed handshake. Used only on the event loop.

    Args:
        certificates: The certificates of this process.
        peer_log: Logs the reason for each refused connection.
    """

    def __init__(self, certificates: Certificates, peer_log: PeerLog) -> None:
        self._certificates = certificates
        self._peer_log = peer_log
        self._outside: dict[TLSProtocol, None] = {}

    def refused(self, raw: asyncio.Transport, why: str) -> None:
        """Log why a connection was refused."""
        address = raw.get_extra_info("peername")
        self._peer_log.note(
            logging.WARNING, str(address[0]) if address else "a peer", f"a connection was refused: {why}"
        )

    def close(self) -> None:
        """Abort all connections without a completed handshake."""
        for protocol in tuple(self._outside):
            protocol.abort()

    def begin(self, protocol: TLSProtocol) -> TLSChannel:
        """Add a connection to the count, and return the channel for its handshake."""
        if len(self._outside) >= _MAX_OUTSIDE:
            oldest = next(iter(self._outside))
            self.end(oldest)
            oldest.abort()
        self._outside[protocol] = None
        return TLSChannel(self._certificates.for_server(), server_hostname=None)

    def end(self, protocol: TLSProtocol) -> None:
        """Remove a connection from the count: its handshake is complete, or the connection has closed."""
        self._outside.pop(protocol, None)


class TLSProtocol(asyncio.Protocol):
    """The protocol of one TLS connection: performs the handshake, then decrypts bytes for the inner protocol.

    Args:
        acceptor: Counts the connection until its handshake is complete.
        make_protocol: Creates the inner protocol. Called after the handshake.
        refused: Called when the connection has closed before the handshake was complete.
    """

    def __init__(
        self,
        acceptor: TLSAcceptor,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        refused: Callable[[], object],
    ) -> None:
        self._acceptor = acceptor
        self._make_protocol = make_protocol
        self._when_refused = refused
        self._is_refused = False
        self._raw: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._channel: TLSChannel | None = None
        self._inside: TLSTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        self._channel = self._acceptor.begin(self)
        self._timer = asyncio.get_running_loop().call_later(_HANDSHAKE_TIMEOUT_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        assert self._raw is not None
        channel = self._channel
        if channel is None or self._is_refused or self._raw.is_closing():
            return
        try:
            channel.feed(data)
            if self._inside is None and not self._shake_hands(channel, self._raw):
                return
            assert self._inside is not None
            self._inside.deliver()
        except (TLSRefusedError, TLSBrokenError) as error:
            self._refuse(channel, self._raw, str(error))

    def eof_received(self) -> bool | None:
        """See ``asyncio.Protocol``."""
        if self._inside is not None:
            self._inside.protocol.eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_timer()
        self._acceptor.end(self)
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.protocol.connection_lost(exc)
        else:
            self._when_refused()

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        if self._inside is not None:
            self._inside.protocol.pause_writing()

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        if self._inside is not None:
            self._inside.protocol.resume_writing()

    def abort(self) -> None:
        """Abort the connection."""
        if self._raw is not None:
            self._raw.abort()

    def _shake_hands(self, channel: TLSChannel, raw: asyncio.Transport) -> bool:
        if not channel.shake_hands():
            raw.write(channel.take())
            return False
        raw.write(channel.take())
        self._stop_timer()
        self._acceptor.end(self)
        protocol = self._make_protocol()
        assert isinstance(protocol, asyncio.Protocol)
        self._inside = TLSTransport(raw, channel, protocol)
        protocol.connection_made(self._inside)
        return True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        assert self._raw is not None
        self._acceptor.refused(self._raw, f"expected a TLS handshake within {_HANDSHAKE_TIMEOUT_S:g} s")
        self._raw.abort()

    def _refuse(self, channel: TLSChannel, raw: asyncio.Transport, why: str) -> None:
        self._is_refused = True
        self._stop_timer()
        self._acceptor.refused(raw, why)
        alert = channel.take()
        if self._inside is not None:
            raw.write(alert)
            raw.close()
            return
        raw.write(alert or PLAIN_ALERT)
        with contextlib.suppress(OSError, NotImplementedError):
            raw.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_LINGERING_S, raw.abort)


class TLSTransport(asyncio.Transport):
    """The inner protocol's transport, which encrypts what it passes to asyncio's transport.

    Args:
        raw: asyncio's transport.
        channel: The TLS state after the handshake.
        protocol: The inner protocol.

    Attributes:
        protocol: The inner protocol.
    """

    def __init__(self, raw: asyncio.Transport, channel: TLSChannel, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self._raw = raw
        self._channel = channel
        self._is_lent = False
        self._unwritten: list[bytes] = []
        self._is_reading = True

    def lend(self) -> TLSChannel:
        """Lend the TLS state to a thread. Until `give_back`, this object neither reads nor writes."""
        assert not self._is_lent, "one body at a time is sent on a connection"
        self._is_lent = True
        self._raw.pause_reading()
        return self._channel

    def give_back(self) -> None:
        """Take the TLS state back from the thread, and perform the delayed writes and reads."""
        self._is_lent = False
        unwritten, self._unwritten = self._unwritten, []
        self.writelines(unwritten)
        if self._is_reading:
            self._raw.resume_reading()

    def deliver(self) -> None:
        """Decrypt received bytes and pass them to the inner protocol."""
        assert not self._is_lent, "nothing is read meanwhile"
        channel = self._channel
        buffer = memoryview(bytearray(MAX_RECORD_BYTES))
        while not self._raw.is_closing() and (got := channel.read_into(buffer)):
            self.protocol.data_received(bytes(buffer[:got]))
        if channel.must_send and not self._raw.is_closing():
            self._raw.write(channel.take())
        if channel.is_ended and not self._raw.is_closing():
            self.protocol.eof_received()
            self.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See ``asyncio.BaseTransport``."""
        # aiohttp recognizes TLS by the presence of a context.
        return self._channel.object.context if name == "sslcontext" else self._raw.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """See ``asyncio.WriteTransport``."""
        if not data or self._raw.is_closing():
            return
        if self._is_lent:
            self._unwritten.append(bytes(data))
            return
        self._channel.write(data)
        self._raw.write(self._channel.take())

    def writelines(self, list_of_data: Any) -> None:
        """See ``asyncio.WriteTransport``."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """See ``asyncio.BaseTransport``."""
        if not self._is_lent and not self._raw.is_closing() and not self._raw.get_write_buffer_size():
            self._channel.end()
            # Does not wait: if the peer does not read, the socket may be full, and the announcement is not sent.
            with contextlib.suppress(OSError):
                os.write(self._raw.get_extra_info("socket").fileno(), self._channel.take())
        self._raw.close()

    def abort(self) -> None:
        """See ``asyncio.WriteTransport``."""
        self._raw.abort()

    def is_closing(self) -> bool:
        """See ``asyncio.BaseTransport``."""
        return self._raw.is_closing()

    def is_reading(self) -> bool:
        """See ``asyncio.ReadTransport``."""
        return self._is_reading

    def pause_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._is_reading = False
        if not self._is_lent:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._is_reading = True
        if not self._is_lent:
            self._raw.resume_reading()

    def get_write_buffer_size(self) -> int:
        """See ``asyncio.WriteTransport``."""
        return self._raw.get_write_buffer_size()
