"""One HTTP connection with blocking reads straight into given memory; every wait has a deadline.

``http.client`` parses the responses; `body_reader` reads the bytes of a body directly from the socket, because passing
them through Python objects costs more than the transfer itself.
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
from ft_transport.keys import TOKEN_VARIABLE, Keys
from ft_transport.runtime.children import close_in_children, making_socket
from ft_transport.tls import CERTIFICATE_VARIABLE, Certificates
from ft_transport.wire.routes import CHALLENGE_ROUTE, REPLICA_HEADER, SAME_HOST_HEADER, RequestRead
from ft_transport.wire.signing import CONTENT_DIGEST_HEADER, content_digest

_NOT_IN_HEADERS: Final = re.compile("[^!-~]")
_MAX_REPLICA_CHARACTERS: Final = 64


class Connection:
    """A keep-alive connection to one peer. Used by one thread at a time; a context manager that closes it.

    Args:
        peer: The server.
        keys: The job's keys, if it has any: the peer has to prove that it knows them, and so does each request.
        certificates: This side's certificates, if it has any: then only TLS is used, and otherwise none.
        timeouts: Deadlines and the minimum throughput.
        replica: Name of this replica, for the peer's audit log.

    Attributes:
        peer: The server.
        same_host: The socket at which receivers on the peer's host get its memory, as the peer last announced it;
            ``None`` if it did not.
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
        self._is_interrupted = False
        close_in_children(self)
        if timeouts.handle is not None:
            timeouts.handle.add(self)

    @classmethod
    def of(cls, peer: PeerAddress, settings: FetchSettings) -> Connection:
        """Return a connection with the settings of a fetch; it opens at its first request."""
        return cls(
            peer,
            keys=settings.keys,
            certificates=settings.certificates,
            timeouts=settings.timeouts,
            replica=settings.replica,
        )

    def is_mine(self, candidate: socket.socket) -> bool:
        """See ``runtime.children``."""
        timed = self._socket
        if timed is not None and candidate.fileno() == timed.raw.fileno():
            return True
        try:
            # During a close Python has already forgotten the descriptor.
            return bool(candidate.getpeername() == self._address)
        except OSError:  # not connected
            return False

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; the next request opens a new one."""
        if self._socket is not None:
            self._socket.raw.close()
        self._http = self._socket = self._session = None

    @property
    def reached(self) -> str:
        """The address and port, without host names, at which the peer was last reached."""
        return socket_address(self._address) if isinstance(self._address, tuple) else ""

    @property
    def stall_timeout_s(self) -> float:
        """The longest silence of the peer, in seconds."""
        return self._timeouts.stall_timeout_s

    @property
    def is_interrupted(self) -> bool:
        """Whether `interrupt` has ended this connection: each further request fails."""
        return self._is_interrupted

    def interrupt(self) -> None:
        """End another thread's wait at once, and refuse further requests. Thread-safe."""
        self._is_interrupted = True
        timed = self._socket
        if timed is not None:
            with contextlib.suppress(OSError):
                timed.raw.shutdown(socket.SHUT_RDWR)

    def get(
        self,
        path: str,
        *,
        headers: dict[str, str],
        expected_status: int,
        answer_within_s: float,
        body: bytes | None = None,
    ) -> HTTPResponse:
        """Send a request and read the head of the response; read the body with ``read_into`` afterwards.

        Args:
            path: Path and query.
            headers: Further headers.
            expected_status: Any other is an error.
            answer_within_s: How long the peer may hold the request on purpose, in seconds.
            body: Body to post; ``None`` for a GET.

        Raises:
            PeerUnreachableError: The connection failed or broke, or nothing came for too long.
            PeerError: The peer refused or did not authenticate itself; the class says why.
            MessageDamagedError: The request or the head of its response was damaged on the way.
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
                raise MessageDamagedError(
                    f"expected an answer with a proof of the job token, that of status {response.status} has none or "
                    "was changed on its way",
                    peer=str(self.peer),
                )
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
            # Bytes that were read together with the head are the body's.
            assert self._socket is not None
            self._socket.head_complete = True
            assert self._body is not None
            self._body.ahead = response.fp.peek()
            return response
        except BaseException as error:
            self._fail(error, f"waiting for the answer to {path}")

    def read_body(self, response: HTTPResponse, *, max_bytes: int) -> bytearray:
        """Read a whole body, compare it with the digest that the peer's proof covers, and end the response.

        Args:
            response: The result of `get`.
            max_bytes: Maximum length.

        Raises:
            PeerProtocolError: The body is longer, or of unknown length.
            MessageDamagedError: The body was changed on the way.
            PeerUnreachableError: The body ended early or came too slowly.
            DeadlineExceededError: The deadline passed.
        """
        length = response.length
        if length is None or length > max_bytes:
            self.close()
            raise PeerProtocolError(
                f"expected an answer of at most {max_bytes} bytes, the peer announced {length}", peer=str(self.peer)
            )
        body = bytearray(length)
        self.read_into([memoryview(body)])
        if self._session is not None and response.headers.get(CONTENT_DIGEST_HEADER) != content_digest(body):
            self.close()
            raise MessageDamagedError(f"the body of an answer of {length} bytes was changed", peer=str(self.peer))
        self.end_response(response)
        return body

    def _begin_session(self, http: HTTPConnection, keys: Keys) -> ClientSession:
        """Make the peer prove that it knows the job token, at the address where it was reached."""
        assert self._socket is not None
        challenge = make_challenge(keys, socket_address(self._socket.raw.getpeername()))
        path = f"{CHALLENGE_ROUTE}?{urlencode(challenge.query())}"
        response = self._ask(http, "GET", path, {})
        expected = f"expected the peer to prove that it knows the job token ({TOKEN_VARIABLE})"
        if response.status != 200:
            refusal = refusal_of(response, self.peer, in_session=False, has_token=True)
            if refusal.retryable:
                if isinstance(refusal, PeerNotReadyError):
                    # This answer is not authenticated: with a forged ``after``, an older snapshot would be new enough.
                    refusal.after = None
                raise refusal
            refusal = PeerAuthenticationError(f"{expected}, it did not: {refusal.message}", peer=str(self.peer))
            check_understood(RequestRead("GET", path, {}, None), response, refusal, self.peer)
            raise refusal
        session = begin_session(keys, challenge, response.read(MAX_ERROR_BODY_BYTES))
        if session is None:
            self._num_unproved += 1
            # The first failure may be a byte that was changed on the way.
            error_type = MessageDamagedError if self._num_unproved == 1 else PeerAuthenticationError
            raise error_type(f"{expected}, its proof is wrong", peer=str(self.peer))
        self._num_unproved = 0
        self.end_response(response)
        if self._http is None:
            raise PeerUnreachableError(
                "the peer closed the connection on which it had proved itself", peer=str(self.peer)
            )
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

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fill all views, in order, with the next bytes of the body.

        Raises:
            PeerUnreachableError: The body ended early or came too slowly.
            DeadlineExceededError: The deadline passed.
        """
        assert self._socket is not None
        assert self._body is not None
        try:
            self._body.read_into(views)
        except BaseException as error:
            self._fail(error, "reading")

    def pace_anew(self) -> None:
        """See `BodyReader.pace_anew`."""
        assert self._body is not None
        self._body.pace_anew()

    def end_response(self, response: HTTPResponse) -> None:
        """Free the connection for the next request, after the whole body was read."""
        response.close()
        if response.will_close:
            self.close()

    def _connected(self) -> HTTPConnection:
        if self._http is not None:
            return self._http
        self._check_scheme()
        timed = self._open()
        self._http = HTTPConnection(self.peer.host, self.peer.port)
        self._http.auto_open = 0
        self._http.sock = timed
        return self._http

    def _check_scheme(self) -> None:
        """Refuse a peer whose use of TLS differs from this side's."""
        if self.peer.is_tls == (self._certificates is not None):
            return
        raise PeerAuthenticationError(
            f"expected a certificate of this side ({CERTIFICATE_VARIABLE}), because the peer's address is https://"
            if self.peer.is_tls
            else f"expected an address https://, because this side has a certificate ({CERTIFICATE_VARIABLE}), and the "
            "peer's is http://",
            peer=str(self.peer),
        )

    def _open(self) -> DeadlineSocket:
        """Connect to the first of the peer's addresses that accepts."""
        doing = f"connecting to {self.peer}"
        timeout_s = min(self._timeouts.connect_timeout_s, self._timeouts.remaining_s(doing, self.peer))
        failures = []
        for family, kind, protocol, _name, address in look_up(
            self.peer, timeout_s=timeout_s, is_given_up=lambda: self._is_interrupted
        ):
            timeout_s = min(self._timeouts.connect_timeout_s, self._timeouts.remaining_s(doing, self.peer))
            with making_socket:
                self._socket = timed = DeadlineSocket(socket.socket(family, kind, protocol))
            self._address = address
            try:
                timed.raw.settimeout(timeout_s)
                timed.raw.connect(address)
                timed.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._certificates is not None:
                    timed.tls = TLSStream(timed.raw, self.peer, self._certificates)
                    timed.read_until_s = time.monotonic() + timeout_s
                    timed.tls.shake_hands(timed.arm)
            except OSError as error:
                self.close()
                failures.append(f"{address[0]}: {type(error).__name__}: {error}")
                continue
            if self._is_interrupted:
                raise PeerUnreachableError("the request was given up", peer=str(self.peer))
            self.num_opened += 1
            self.local_address = str(timed.raw.getsockname()[0])
            return timed
        self._timeouts.remaining_s(doing, self.peer)
        raise PeerUnreachableError(f"no address accepts a connection: {'; '.join(failures)}", peer=str(self.peer))

    @property
    def _num_received(self) -> int:
        """Bytes received of the last response's body."""
        return self._body.num_bytes if self._body is not None else 0

    def _fail(self, error: BaseException, doing: str) -> NoReturn:
        """Close the connection, and raise the failure as an error of this package where one exists for it."""
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
                what = f"expected an HTTP answer, got {type(error).__name__}: {str(error)[:200]!r}; {doing}"
                raise MessageDamagedError(what, peer=str(self.peer)) from error
            case _:
                raise error

    def _timed_out(self, doing: str) -> TransportError:
        """Return the error after a wait: the deadline passed, or this peer is too slow and a retry may help."""
        doing = f"{doing} after {self._num_received} bytes"
        if self._timeouts.is_over():
            return DeadlineExceededError(f"timed out {doing}: {self._timeouts.reason()}", peer=str(self.peer))
        return PeerSilentError(
            f"timed out {doing}: nothing came for {self._timeouts.stall_timeout_s:g} s, or less than "
            f"{self._timeouts.min_bytes_per_s:.0f} bytes/s",
            peer=str(self.peer),
        )
