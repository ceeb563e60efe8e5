"""The interface `Engine` of all inference engines, and the HTTP connection to an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import aiohttp

from ft_transport.errors import ConfigurationError, EngineRefusedError, EngineUnreachableError, escape_peer_text
from ft_transport.runtime.signal_safe import SafeFuture, SafeThread

T = TypeVar("T")

logger = logging.getLogger(__name__)
_MAX_BODY_BYTES: Final = 1 << 20
_MAX_SHOWN_CHARACTERS: Final = 2000
_RESUME_TIMEOUT_S: Final = 30.0
NO_ROUTE: Final = (404, 405)
"""HTTP statuses with which an engine answers if it does not have a route."""
Kind = Literal["adapter", "weights"]
LEFT_PAUSED: Final = (
    "the engine stays paused, because its weights may be half replaced: the next version resumes the engine if it "
    "loads, otherwise restart the engine"
)
_afterwards: Final[set[asyncio.Task[None]]] = set()
"""Running background tasks. The event loop has only weak references to tasks, so something else must own them."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version to deliver: complete on disk, and never changed.

    Attributes:
        version: Number of the version.
        kind: ``adapter``: a LoRA adapter in PEFT's layout. ``weights``: all weights of a model as safetensors files.
        directory: Directory of the version. The engine must see the directory under the same path.
        address: A function that starts to serve the version over HTTP if necessary, and returns the transport's URL.
            ``None`` if the publisher has no transport.
    """

    version: int
    kind: Kind
    directory: Path
    address: Callable[[], Awaitable[str]] | None = None

    async def source(self, engine: str) -> str:
        """Begin to serve the version if necessary, and return the transport's URL.

        Args:
            engine: URL of the engine that will fetch the version, for the error.

        Raises:
            EngineRefusedError: The publisher has no transport.
        """
        if self.address is None:
            raise EngineRefusedError(
                "expected a publisher that serves versions; pass a transport to Publisher", peer=engine
            )
        return await self.address()


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response of an engine.

    Attributes:
        request: Method and URL of the request.
        status: HTTP status.
        body: The body as text.
    """

    request: str
    status: int
    body: str

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            EngineRefusedError: The body is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise self.refusal("expected an answer in JSON") from None

    def refusal(self, message: str) -> EngineRefusedError:
        """Return an error that says what was expected, with status and body of this response."""
        return EngineRefusedError(
            f"{message}; {self.request} answered {self.status}: "
            f"{escape_peer_text(self.body, max_characters=_MAX_SHOWN_CHARACTERS)}",
            status=self.status,
            body=self.body[:_MAX_SHOWN_CHARACTERS],
            request=self.request,
        )


@dataclass(slots=True, eq=False)
class Link:
    """The state of an engine that a publisher keeps if the engine is removed and added again.

    Attributes:
        mutex: Serialises deliveries and polls.
        polling: The running poll, which holds the mutex; a delivery cancels the poll.
        unfinished: Running tasks that must end before the next attempt to deliver, such as a task that resumes the
            engine.
        is_left_paused: Whether a delivery left the engine paused, because the weights may be half replaced.
        is_in_doubt: Whether an update of the weights has begun since the engine last confirmed a version.
    """

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    polling: asyncio.Future[Any] | None = None
    unfinished: set[asyncio.Task[None]] = field(default_factory=set)
    is_left_paused: bool = False
    is_in_doubt: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a delivery, a poll or another task is using the engine."""
        return self.mutex.locked() or bool(self.unfinished)


class EngineConnection:
    """Sends HTTP requests to one engine. Not thread-safe: used on one event loop.

    Args:
        session: The HTTP session. It needs no timeouts, because every delivery and poll has a deadline.
        engine: The engine, which provides base URL and headers.
        link: The engine's `Link`.
        serving: The set of versions that the engine reports to serve. Deliveries and polls update the set.

    Attributes:
        url: Base URL of the engine.
        link: The engine's `Link`.
        serving: The set of versions that the engine reports to serve.
    """

    def __init__(self, session: aiohttp.ClientSession, engine: Engine, link: Link, serving: set[int]) -> None:
        self.url = engine.url
        self.link = link
        self.serving = serving
        self._session = session
        self._headers = dict(engine.headers)

    async def get(self, path: str, **params: str) -> Answer:
        """Send a GET request.

        Raises:
            EngineUnreachableError: The connection failed or broke.
            EngineRefusedError: The engine answered with a status of 300 or more.
        """
        return await self._request("GET", path, params, None)

    async def post(self, path: str, body: Mapping[str, object] | None = None, **params: str) -> Answer:
        """Send a POST request with a JSON body. Raises the same errors as `get`."""
        return await self._request("POST", path, params, body)

    async def pause(self, path: str, body: Mapping[str, object] | None = None, *, advice: str, **params: str) -> Answer:
        """Send the POST request that pauses the engine, inside a `resuming` context. Raises the same errors as `get`.

        Args:
            path: The route.
            body: JSON body of the request.
            advice: Advice to the user if the engine does not have the route. In this case, the engine was not paused,
                and `resuming` does not resume it.
            **params: Query parameters of the request.
        """
        try:
            return await self.post(path, body, **params)
        except EngineRefusedError as error:
            if error.status not in NO_ROUTE:
                raise
            raise _NotPausedError(
                f"expected the route {path}",
                status=error.status,
                body=f"{error.body}; {advice}",
                request=error.request,
                peer=self.url,
            ) from error

    @contextlib.asynccontextmanager
    async def resuming(self, resume: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """Resume the engine at the end of the context, even if the context fails or its deadline expires.

        The engine stays paused if the failure is inside a `replacing` context with ``stays_paused=True``.

        Args:
            resume: Sends the request that resumes the engine.
        """
        try:
            yield
            await resume()
            self.link.is_left_paused = False
        except _NotPausedError:
            raise
        except BaseException as error:
            if self.link.is_left_paused:
                if isinstance(error, EngineRefusedError):
                    error.body = f"{error.body}; {LEFT_PAUSED}"
                raise
            # A background task, so that the caller gets the outcome at once. The next attempt waits for the task.
            task = asyncio.get_running_loop().create_task(self._resume_late(resume))
            self.link.unfinished.add(task)
            task.add_done_callback(self.link.unfinished.discard)
            raise

    def afterwards(self, work: Coroutine[Any, Any, None]) -> None:
        """Start background work. Closing the publisher cancels the work."""

        async def run() -> None:
            try:
                await work
            except (EngineRefusedError, EngineUnreachableError) as error:
                logger.info("%s: %s", self.url, error)

        task = asyncio.get_running_loop().create_task(run())
        _afterwards.add(task)
        task.add_done_callback(_afterwards.discard)

    @contextlib.contextmanager
    def replacing(self, *, stays_paused: bool) -> Iterator[None]:
        """Mark the engine's weights as being replaced during the context.

        The engine's version is unknown from the beginning of the context until the engine confirms a version.

        Args:
            stays_paused: Whether the engine must stay paused if the context fails. During an update vLLM's parameters
                have no memory, so a request would crash the engine
                (vllm/model_executor/model_loader/reload/layerwise.py).
        """
        self.link.is_in_doubt = True
        self.link.is_left_paused = stays_paused
        yield
        self.link.is_left_paused = False

    async def _resume_late(self, resume: Callable[[], Awaitable[object]]) -> None:
        deadline_s = time.monotonic() + _RESUME_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(resume(), left_s)
                return
            except (EngineRefusedError, EngineUnreachableError, TimeoutError, asyncio.TimeoutError) as error:
                failure = error
            await asyncio.sleep(0.2)
        logger.warning("%s could not be resumed within %g s: %s", self.url, _RESUME_TIMEOUT_S, failure)

    async def _request(
        self, method: str, path: str, params: Mapping[str, str], body: Mapping[str, object] | None
    ) -> Answer:
        url = f"{self.url}{path}"
        request = f"{method} {url}"
        status: int | None = None
        data = bytearray()
        try:
            async with self._session.request(
                method, url, params=params or None, json=body, headers=self._headers, allow_redirects=False
            ) as response:
                status = response.status
                # A refusal counts even if its body does not arrive completely.
                patience_s = 2.0 if status >= 300 else None
                await asyncio.wait_for(_read(response.content, data), patience_s)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError, OSError) as error:
            if status is None or status < 300:
                raise EngineUnreachableError(
                    f"expected an answer to {request}, the connection failed: {type(error).__name__}: {error}",
                    peer=self.url,
                ) from error
        except (aiohttp.ClientError, LookupError, ValueError) as error:
            raise EngineRefusedError(
                f"expected a valid HTTP answer to {request}, got {type(error).__name__}: {error}",
                request=request,
                status=status,
            ) from error
        answer = Answer(request, status, data.decode("utf-8", "replace"))
        if answer.status >= 300:
            raise answer.refusal("expected the engine to accept the request")
        return answer


class _NotPausedError(EngineRefusedError):
    """The engine has no route to pause it, so it is not paused."""


async def _read(content: aiohttp.StreamReader, data: bytearray) -> None:
    while len(data) < _MAX_BODY_BYTES and (chunk := await content.readany()):
        data += chunk


@runtime_checkable
class Engine(Protocol):
    """The interface of an inference engine.

    The publisher refuses an adapter that the engine cannot apply. By default an engine applies plain LoRA
    (``lora_alpha / r * B @ A`` on the unmodified base). An engine that applies further features lists them in the set
    ``adapter_features``, an attribute: fields of PEFT's ``LoraConfig`` (such as ``use_dora``), and ``lora_embedding``.
    If the attribute is ``None``, the engine applies every adapter.

    Attributes:
        url: Base URL of the engine, which also names the engine in reports.
        headers: HTTP headers of each request, such as ``Authorization``.
    """

    url: str
    headers: Mapping[str, str]

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Makes the engine use a version. Must be idempotent, because the publisher may repeat the call.

        Returns:
            The version that the engine confirms to use.

        Raises:
            EngineUnreachableError: The connection failed. The publisher repeats the call.
            EngineRefusedError: The engine refuses the version. The publisher does not repeat the call.
        """
        ...


@runtime_checkable
class PolledEngine(Engine, Protocol):
    """An engine that can report its version. A publisher delivers a version again if the engine has lost it."""

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """Returns the version that the engine serves now. Must not change the engine. Not called during a delivery.

        Args:
            connection: Connection to the engine.
            newest: The newest version. Its kind tells whether the engine serves an adapter or weights. The directories
                of earlier versions are in the same parent directory.

        Returns:
            The version; ``None`` if the engine serves none of this publisher's versions.

        Raises:
            EngineUnreachableError: The connection failed. The publisher polls again later.
            EngineRefusedError: The engine refuses to report its version. The publisher polls again later. A status in
                `NO_ROUTE` means that the engine runs, but cannot report a version.
        """
        ...


def checked_url(url: str) -> str:
    """Check the base URL of an engine, and remove a slash at its end.

    Raises:
        ConfigurationError: The value is not a base URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigurationError(f"expected the base URL of an engine, http://host:port, got {url!r}")
    return url.rstrip("/")


def weight_version(answer: Answer) -> int | None:
    """Return the ``weight_version`` in an engine's response; ``None`` if no publisher has set it yet.

    Raises:
        EngineRefusedError: The response is not JSON.
    """
    fields = answer.json()
    version = fields.get("weight_version") if isinstance(fields, dict) else None
    if not isinstance(version, str) or not version.isdecimal() or len(version) > 18:
        return None
    return int(version)


def confirmed_weight_version(answer: Answer, expected: int) -> int:
    """Return the ``weight_version`` in an engine's response after an update.

    Args:
        answer: The response.
        expected: The delivered version, for the error.

    Raises:
        EngineRefusedError: The response has no ``weight_version`` that a publisher has set.
    """
    version = weight_version(answer)
    if version is None:
        raise answer.refusal(f"expected weight_version {expected}")
    return version


async def in_daemon_thread(name: str, function: Callable[..., T], *arguments: object) -> T:
    """Call a function on a daemon thread, and wait for its result.

    Threads of ``asyncio.to_thread`` would block the exit of the process until the function returns.

    Args:
        name: Name of the thread.
        function: The function to call. Cancelling the wait does not stop the function.
        *arguments: Arguments of the function.

    Raises:
        Exception: The error of the function.
    """
    outcome: Future[T] = SafeFuture()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    SafeThread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)
