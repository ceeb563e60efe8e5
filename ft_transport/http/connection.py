"""One HTTP connection with blocking reads straight into given memory, every wait of which has a deadline.

``http.client`` parses the answers; the bytes of a body are read from its socket directly (`body_reader`), because
passing them through Python objects costs more than the transfer itself.
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
from ft_transport.http.answers import MAX_ERROR_BODY_BYTES, check_understood, refusal_of
from ft_transport.http.body_reader import BodyReader
from ft_transport.http.fetch_timeouts import Timeouts
from ft_transport.http.fork_safety import close_in_children, making_socket
from ft_transport.http.peer_address import PeerAddress, look_up
from ft_transport.http.peer_sessions import ClientSession, begin_session, make_challenge, socket_address
from ft_transport.http.timed_socket import TimedSocket
from ft_transport.http.tls_stream import TLSStream
from ft_transport.keys import TOKEN_VARIABLE, Keys
from ft_transport.tls import CERTIFICATE_VARIABLE, Certificates
from ft_transport.wire.authentication import CONTENT_DIGEST_HEADER, content_digest
from ft_transport.wire.exchange_digest import RequestRead
from ft_transport.wire.routes import CHALLENGE_ROUTE, REPLICA_HEADER, SAME_HOST_HEADER

_NOT_IN_HEADERS: Final = re.compile("[^!-~]")
_MAX_REPLICA_CHARACTERS: Final = 64


class Connection:
    """A keep-alive connection to one peer. Used by one thread at a time; a context manager that closes it.

    Args:
        peer: The server.
        keys: Those of the job, if it has any: the peer has to prove that it knows them, and so does each request.
        certificates: This side's, if it has any: peers are reached by TLS alone then, and otherwise without it.
        timeouts: How long things may take.
        replica: What the peer is told of who asks, for its audit.

    Attributes:
        peer: As above.
        same_host: What the peer last said of where receivers on its host get memory; ``None`` if it said nothing.
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
        self._socket: TimedSocket | None = None
        self._address: object = None
        self.num_opened = 0
        self.local_address = ""
        self._body: BodyReader | None = None
        self._is_interrupted = False
        close_in_children(self)
        if timeouts.handle is not None:
            timeouts.handle.add(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """See ``http.fork_safety``."""
        timed = self._socket
        if timed is not None and candidate.fileno() == timed.raw.fileno():
            return True
        try:
            # While it is being closed, Python has forgotten its descriptor already.
            return bool(candidate.getpeername() == self._address)
        except OSError:  # not connected
            return False

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the connection; the next request opens a new one."""
        if self._socket is not None:
            self._socket.raw.close()
        self._http = self._socket = self._session = None

    @property
    def reached(self) -> str:
        """Where the peer was reached last: an address and a port, and not the name that stands for it."""
        return socket_address(self._address) if isinstance(self._address, tuple) else ""

    @property
    def stall_timeout_s(self) -> float:
        """How long nothing may come, in seconds."""
        return self._timeouts.stall_timeout_s

    @property
    def is_interrupted(self) -> bool:
        """Whether it was given up; no request on it succeeds any more."""
        return self._is_interrupted

    def interrupt(self) -> None:
        """Ends what another thread is waiting for at once, and all requests to come. Thread-safe."""
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
        """Sends a request and reads the head of the answer; the body is read with ``read_into`` afterwards.

        Args:
            path: Path and query.
            headers: Further ones.
            expected_status: Any other is an error.
            answer_within_s: How long the peer may take on purpose, in seconds.
            body: Is posted, if there is one.

        Raises:
            PeerUnreachableError: No connection, it broke, or nothing came for too long.
            PeerError: The peer refused, or has not proved itself; the class says why.
            MessageDamagedError: The peer has not understood the request, or the head of its answer was damaged.
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
            # What was read ahead while looking for the end of the head belongs to the body.
            assert self._socket is not None
            self._socket.head_complete = True
            assert self._body is not None
            self._body.ahead = response.fp.peek()
            return response
        except BaseException as error:
            self._fail(error, f"waiting for the answer to {path}")

    def read_body(self, response: HTTPResponse, *, max_bytes: int) -> bytearray:
        """Reads all of a body, compares it with the digest that a peer's proof covers, and ends the answer.

        Args:
            response: As `get` returned it.
            max_bytes: The longest that is accepted.

        Raises:
            PeerProtocolError: It is longer, or of unknown length.
            MessageDamagedError: It was changed on its way.
            PeerUnreachableError: It ended early or came too slowly.
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
        """Has the peer prove that it knows the job token, at the address where it was reached."""
        assert self._socket is not None
        challenge = make_challenge(keys, socket_address(self._socket.raw.getpeername()))
        path = f"{CHALLENGE_ROUTE}?{urlencode(challenge.query())}"
        response = self._ask(http, "GET", path, {})
        expected = f"expected the peer to prove that it knows the job token ({TOKEN_VARIABLE})"
        if response.status != 200:
            refusal = refusal_of(response, self.peer, in_session=False, has_token=True)
            if refusal.retryable:
                if isinstance(refusal, PeerNotReadyError):
                    # Nobody has proved anything yet: with an ``after`` of the way an older snapshot were new enough.
                    refusal.after = None
                raise refusal
            refusal = PeerAuthenticationError(f"{expected}, it did not: {refusal.message}", peer=str(self.peer))
            check_understood(RequestRead("GET", path, {}, None), response, refusal, self.peer)
            raise refusal
        session = begin_session(keys, challenge, response.read(MAX_ERROR_BODY_BYTES))
        if session is None:
            self._num_unproved += 1
            # The first time something on the way may have changed a byte.
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
        """Sends a request and reads the head of its answer."""
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
        """Fills all views, in order, with the next bytes of the body.

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
        """Frees the connection for the next request, once the body was read to its end."""
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
        """Refuses a peer that would be reached in another way than this side is reached."""
        if self.peer.is_tls == (self._certificates is not None):
            return
        raise PeerAuthenticationError(
            f"expected a certificate of this side ({CERTIFICATE_VARIABLE}), because the peer's address is https://"
            if self.peer.is_tls
            else f"expected an address https://, because this side has a certificate ({CERTIFICATE_VARIABLE}), and the "
            "peer's is http://",
            peer=str(self.peer),
        )

    def _open(self) -> TimedSocket:
        """Connects to the first of the peer's addresses that answers."""
        doing = f"connecting to {self.peer}"
        timeout_s = min(self._timeouts.connect_timeout_s, self._timeouts.remaining_s(doing, self.peer))
        failures = []
        for family, kind, protocol, _name, address in look_up(
            self.peer, timeout_s=timeout_s, is_given_up=lambda: self._is_interrupted
        ):
            timeout_s = min(self._timeouts.connect_timeout_s, self._timeouts.remaining_s(doing, self.peer))
            with making_socket:
                self._socket = timed = TimedSocket(socket.socket(family, kind, protocol))
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
        """How much of the last answer's body has come."""
        return self._body.num_bytes if self._body is not None else 0

    def _fail(self, error: BaseException, doing: str) -> NoReturn:
        """Closes the connection after whatever went wrong, and raises that as an error of ours where it has one."""
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
        """The error after a wait: the whole deadline is over, or this peer is too slow and another try may help."""
        doing = f"{doing} after {self._num_received} bytes"
        if self._timeouts.is_over():
            return DeadlineExceededError(f"timed out {doing}: {self._timeouts.reason()}", peer=str(self.peer))
        return PeerSilentError(
            f"timed out {doing}: nothing came for {self._timeouts.stall_timeout_s:g} s, or less than "
            f"{self._timeouts.min_bytes_per_s:.0f} bytes/s",
            peer=str(self.peer),
        )
