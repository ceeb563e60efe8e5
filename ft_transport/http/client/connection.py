"""An HTTP connection that receives bodies into the caller's memory, with a deadline for every wait.

``http.client`` parses the heads of responses. `BodyReader` reads bodies from the socket, because passing the bytes
through Python objects would cost more time than the transfer itself.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final, NoReturn
from urllib.parse import urlencode

from ft_transport.credentials import CERTIFICATE_VARIABLE, TOKEN_VARIABLE, Certificates, Keys
from ft_transport.errors import (
    DeadlineExceededError,
    MessageDamagedError,
    PeerAuthenticationError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerSilentError,
    PeerUnreachableError,
    TransportError,
)
from ft_transport.http.client.deadline_socket import DeadlineSocket, TLSStream
from ft_transport.http.client.fetch_settings import FetchSettings, Timeouts
from ft_transport.http.client.responses import (
    MAX_ERROR_BODY_BYTES,
    BodyReader,
    ClientSession,
    begin_session,
    check_understood,
    make_challenge,
    refusal_of,
)
from ft_transport.http.peer_address import PeerAddress, look_up, socket_address
from ft_transport.runtime.children import close_in_children, making_socket
from ft_transport.wire.routes import CHALLENGE_ROUTE, REPLICA_HEADER, SAME_HOST_HEADER, RequestRead
from ft_transport.wire.signing import CONTENT_DIGEST_HEADER, content_digest

_NOT_IN_HEADERS: Final = re.compile("[^!-~]")
_MAX_REPLICA_CHARACTERS: Final = 64


class Connection:
    """A keep-alive connection to one peer, for one thread at a time. As a context manager, it closes itself.

    Args:
        peer: Address of the server.
        keys: The job's keys, which authenticate the server and each request; ``None`` without a job token.
        certificates: This process's certificates, for TLS; ``None`` for plain HTTP.
        timeouts: Deadlines and the minimum throughput.
        replica: Name of this replica, for the peer's audit log.

    Attributes:
        peer: Address of the server.
        same_host: Name of the unix socket at which the peer lends its memory to processes on its host; ``None`` until a
            response of the peer contains the name.
        is_interrupted: Whether `interrupt` was called, so that further requests fail.
        num_opened: Number of times that the connection was opened.
        local_address: Local address of the connection; empty until it is first opened.
    """

    def __init__(
        self,
        peer: PeerAddress,
        *,
        keys: Keys | None,
        certificates: Certificates | None,
        timeouts: Timeouts,
        replica: str = "",
    ) -> None:
        self.peer = peer
        self.same_host: str | None = None
        self._always = {"Accept-Encoding": "identity"}
        if replica:
            self._always[REPLICA_HEADER] = _NOT_IN_HEADERS.sub("?", replica)[:_MAX_REPLICA_CHARACTERS]
        self._keys = keys
        self._certificates = certificates
        self._session: ClientSession | None = None
        self._num_unproved = 0
        self._timeouts = timeouts
        self._http: HTTPConnection | None = None
        self._socket: DeadlineSocket | None = None
        self._address: object = None
        self.num_opened = 0
        self.local_address = ""
        self._body: BodyReader | None = None
        self.is_interrupted = False
        close_in_children(self)
        timeouts.handle.add(self)

    @classmethod
    def of(cls, peer: PeerAddress, settings: FetchSettings) -> Connection:
        """Return a connection with the settings of a fetch, which opens at its first request."""
        return cls(
            peer,
            keys=settings.keys,
            certificates=settings.certificates,
            timeouts=settings.timeouts,
            replica=settings.replica,
        )

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket belongs to this connection; see ``runtime.children``."""
        sock = self._socket
        if sock is not None and candidate.fileno() == sock.raw.fileno():
            return True
        try:
            # During a close, Python's socket object has already dropped the descriptor.
            return bool(candidate.getpeername() == self._address)
        except OSError:  # not connected
            return False

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._socket is not None:
            self._socket.raw.close()
        self._http = self._socket = self._session = None

    @property
    def reached(self) -> str:
        """IP address and port at which the peer was last reached; empty before the first attempt."""
        return socket_address(self._address) if isinstance(self._address, tuple) else ""

    @property
    def stall_timeout_s(self) -> float:
        """Longest time without a byte from the peer, in seconds."""
        return self._timeouts.stall_timeout_s

    def interrupt(self) -> None:
        """Interrupt another thread's wait on this connection, and refuse further requests. Thread-safe."""
        self.is_interrupted = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.raw.shutdown(socket.SHUT_RDWR)

    def get(
        self,
        path: str,
        *,
        headers: dict[str, str],
        expected_status: int,
        answer_within_s: float,
        body: bytes | None = None,
    ) -> HTTPResponse:
        """Send a request and read the head of the response. Read the body with `read_into` or `read_body` afterwards.

        Args:
            path: Path and query of the URL.
            headers: Additional headers.
            expected_status: Status of a successful response; any other status is an error.
            answer_within_s: Seconds that the peer may wait before it responds, in addition to the stall timeout.
            body: Body of a POST request; ``None`` for a GET request.

        Raises:
            PeerUnreachableError: The connection failed, or the peer was silent for too long.
            PeerError: The peer refused the request or did not authenticate itself; the subclass says which.
            MessageDamagedError: The request, or the head of the response, was damaged on the way.
            DeadlineExceededError: The deadline passed.
        """
        method = "GET" if body is None else "POST"
        try:
            http = self._connected()
            if self._keys is not None and self._session is None:
                self._session = self._begin_session(http, self._keys)
            session = self._session
            signed = session.signed(method, path, headers, body) if session is not None else headers
            response = self._ask(http, method, path, signed, body=body, answer_within_s=answer_within_s)
            if session is not None and not session.is_proved(response.status, response.headers):
                what = f"expected a response that proves the job token, got one of status {response.status} without a "
                raise MessageDamagedError(f"{what}valid proof; it may be damaged", peer=str(self.peer))
            refusal = (
                refusal_of(response, self.peer, in_session=self._session is not None)
                if response.status != expected_status
                else None
            )
            if session is None and (refusal is None or not refusal.retryable or response.status == 409):
                check_understood(RequestRead(method, path, headers, body), response, refusal, self.peer)
            if refusal is not None:
                raise refusal
            self.same_host = response.headers.get(SAME_HOST_HEADER, self.same_host)
            assert self._socket is not None
            self._socket.head_complete = True
            assert self._body is not None
            self._body.ahead = response.fp.peek()
            return response
        except BaseException as error:
            self._fail(error, f"waiting for the response to {path}")

    def read_body(self, response: HTTPResponse, *, max_bytes: int) -> bytearray:
        """Read a whole body, verify its authenticated digest if the job has a token, and end the response.

        Args:
            response: Result of `get`.
            max_bytes: Maximum length of the body.

        Raises:
            PeerProtocolError: The body is longer than ``max_bytes``, or its length is unknown.
            MessageDamagedError: The body was changed on the way.
            PeerUnreachableError: The body ended early, or its bytes arrived too slowly.
            DeadlineExceededError: The deadline passed.
        """
        length = response.length
        if length is None or length > max_bytes:
            self.close()
            raise PeerProtocolError(
                f"expected a response of at most {max_bytes} bytes, got one of {length} bytes", peer=str(self.peer)
            )
        body = bytearray(length)
        self.read_into([memoryview(body)])
        if self._session is not None and response.headers.get(CONTENT_DIGEST_HEADER) != content_digest(body):
            self.close()
            raise MessageDamagedError(f"the body of a response of {length} bytes was changed", peer=str(self.peer))
        self.end_response(response)
        return body

    def _begin_session(self, http: HTTPConnection, keys: Keys) -> ClientSession:
        """Require the peer to prove that it knows the job token and has the address that this connection reached."""
        assert self._socket is not None
        challenge = make_challenge(keys, socket_address(self._socket.raw.getpeername()))
        path = f"{CHALLENGE_ROUTE}?{urlencode(challenge.query())}"
        response = self._ask(http, "GET", path, {})
        expected = f"expected the peer to prove that it knows the job token ({TOKEN_VARIABLE})"
        if response.status != 200:
            refusal = refusal_of(response, self.peer, in_session=False, has_token=True)
            if refusal.retryable:
                if isinstance(refusal, PeerNotReadyError):
                    # This response is not authenticated. A forged ``after`` could make the receiver accept an older
                    # snapshot.
                    refusal.after = None
                raise refusal
            refusal = PeerAuthenticationError(f"{expected}, got {refusal.message}", peer=str(self.peer))
            check_understood(RequestRead("GET", path, {}, None), response, refusal, self.peer)
            raise refusal
        session = begin_session(keys, challenge, response.read(MAX_ERROR_BODY_BYTES))
        if session is None:
            self._num_unproved += 1
            # The first failure may be a byte that was damaged on the way.
            error_type = MessageDamagedError if self._num_unproved == 1 else PeerAuthenticationError
            raise error_type(f"{expected}, got a wrong proof", peer=str(self.peer))
        self._num_unproved = 0
        self.end_response(response)
        if self._http is None:
            raise PeerUnreachableError("the peer closed the connection after its authentication", peer=str(self.peer))
        return session

    def _ask(
        self,
        http: HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: bytes | None = None,
        answer_within_s: float = 0.0,
    ) -> HTTPResponse:
        """Send a request and read the head of its response."""
        assert self._socket is not None
        self._body = None
        self._socket.read_until_s = min(
            self._timeouts.end_s(), time.monotonic() + answer_within_s + self._timeouts.stall_timeout_s
        )
        self._socket.in_head, self._socket.head_complete = True, False
        self._socket.wake_at(1)
        http.request(method, path, body=body, headers={**headers, **self._always})
        response = http.getresponse()
        self._socket.in_head = False
        self._body = BodyReader(self._socket, peer=self.peer, timeouts=self._timeouts, length=response.length or 0)
        return response

    def read_into(self, views: Sequence[memoryview], *, is_steady: bool = False) -> None:
        """Fill all views, in order, with the next bytes of the body.

        Args:
            views: The memory to fill.
            is_steady: Whether the peer sends the rest of the body without waiting for anything.

        Raises:
            PeerUnreachableError: The body ended early, or its bytes arrived too slowly.
            DeadlineExceededError: The deadline passed.
        """
        assert self._socket is not None
        assert self._body is not None
        try:
            self._body.read_into(views, is_steady=is_steady)
        except BaseException as error:
            self._fail(error, "reading")

    def restart_throughput(self) -> None:
        """Measure the throughput of the current body from now on, without the earlier bytes."""
        assert self._body is not None
        self._body.restart_throughput()

    def end_response(self, response: HTTPResponse) -> None:
        """End a response whose body was read, so that the connection can send the next request."""
        response.close()
        if response.will_close:
            self.close()

    def _connected(self) -> HTTPConnection:
        if self._http is not None:
            return self._http
        self._check_scheme()
        opened = self._open()
        self._http = HTTPConnection(self.peer.host, self.peer.port)
        self._http.auto_open = 0
        self._http.sock = opened
        return self._http

    def _check_scheme(self) -> None:
        """Raise an error if only the peer or only this process uses TLS."""
        if self.peer.is_tls == (self._certificates is not None):
            return
        raise PeerAuthenticationError(
            f"expected a certificate of this process ({CERTIFICATE_VARIABLE}), because the peer's address is https://"
            if self.peer.is_tls
            else f"expected an address https://, because this process has a certificate ({CERTIFICATE_VARIABLE}), got "
            "http://",
            peer=str(self.peer),
        )

    def _open(self) -> DeadlineSocket:
        """Connect to the first of the peer's IP addresses that accepts a connection."""
        doing = f"connecting to {self.peer}"
        timeout_s = min(self._timeouts.connect_timeout_s, self._timeouts.remaining_s(doing, self.peer))
        failures = []
        for family, kind, protocol, _name, address in look_up(
            self.peer, timeout_s=timeout_s, is_given_up=lambda: self.is_interrupted
        ):
            timeout_s = min(self._timeouts.connect_timeout_s, self._timeouts.remaining_s(doing, self.peer))
            with making_socket:
                self._socket = opened = DeadlineSocket(socket.socket(family, kind, protocol))
            self._address = address
            try:
                opened.raw.settimeout(timeout_s)
                opened.raw.connect(address)
                opened.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._certificates is not None:
                    opened.tls = TLSStream(opened.raw, self.peer, self._certificates)
                    opened.read_until_s = time.monotonic() + timeout_s
                    opened.tls.shake_hands(opened.arm)
            except OSError as error:
                self.close()
                failures.append(f"{address[0]}: {type(error).__name__}: {error}")
                continue
            if self.is_interrupted:
                raise PeerUnreachableError("the request was cancelled", peer=str(self.peer))
            self.num_opened += 1
            self.local_address = str(opened.raw.getsockname()[0])
            return opened
        self._timeouts.remaining_s(doing, self.peer)
        raise PeerUnreachableError(f"no address accepts a connection: {'; '.join(failures)}", peer=str(self.peer))

    @property
    def _num_received(self) -> int:
        return self._body.num_bytes if self._body is not None else 0

    def _fail(self, error: BaseException, doing: str) -> NoReturn:
        """Close the connection, and raise ``error``; convert errors of the socket and of HTTP to a `TransportError`."""
        self.close()
        match error:
            case TransportError():
                error.peer = error.peer if error.peer is not None else str(self.peer)
                raise error
            case TimeoutError():
                raise self._timed_out(doing) from error
            case OSError():
                kind = type(error).__name__
                what = f"the connection broke {doing} after {self._num_received} bytes: {kind}: {error}"
                raise PeerUnreachableError(what, peer=str(self.peer)) from error
            case HTTPException():
                what = f"expected an HTTP response, got {type(error).__name__}: {str(error)[:200]!r}; while {doing}"
                raise MessageDamagedError(what, peer=str(self.peer)) from error
            case _:
                raise error

    def _timed_out(self, doing: str) -> TransportError:
        """Return the error for a wait that timed out; it is retryable only if the deadline has not passed."""
        doing = f"{doing} after {self._num_received} bytes"
        if self._timeouts.is_over():
            return DeadlineExceededError(f"timed out {doing}: {self._timeouts.reason()}", peer=str(self.peer))
        return PeerSilentError(
            f"timed out {doing}: no data arrived for {self._timeouts.stall_timeout_s:g} s, or less than "
            f"{self._timeouts.min_bytes_per_s:.0f} bytes/s",
            peer=str(self.peer),
        )
