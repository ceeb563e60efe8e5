"""The interface of an inference engine, and the HTTP connection to it. Another engine is one file like ``vllm``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

import aiohttp

from ft_transport.errors import ConfigurationError, EngineRefusedError, EngineUnreachableError, escape_peer_text

logger = logging.getLogger(__name__)
_MAX_BODY_BYTES: Final = 1 << 20
_MAX_SHOWN_CHARACTERS: Final = 2000
_RESUME_TIMEOUT_S: Final = 30.0
NO_ROUTE: Final = (404, 405)
"""Statuses of a route that an engine does not have."""
Kind = Literal["adapter", "weights"]
LEFT_PAUSED: Final = (
    "the engine stays paused, because its weights may be half replaced: the next version that arrives whole resumes "
    "it, or is refused as well, and the engine has to be restarted"
)
_afterwards: Final[set[asyncio.Task[None]]] = set()
"""The loop itself refers to a task only weakly."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version on disk, complete and never changed again.

    Attributes:
        version: Its number.
        kind: ``adapter``: a LoRA adapter in PEFT's layout. ``weights``: all weights of a model, safetensors.
        directory: Directory of the version, on a file system that the engine sees under the same path.
        address: Makes sure that the version is served over HTTP, and returns its address; ``None`` if no transport
            serves it.
    """

    version: int
    kind: Kind
    directory: Path
    address: Callable[[], Awaitable[str]] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with a status below 400.

    Attributes:
        request: Method and URL.
        status: Its status.
        body: Its text, of any content type.
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
        """Return an error with the expectation, and this answer's status and text."""
        return EngineRefusedError(
            f"{message}; {self.request} answered {self.status}: "
            f"{escape_peer_text(self.body, max_characters=_MAX_SHOWN_CHARACTERS)}",
            status=self.status,
            body=self.body[:_MAX_SHOWN_CHARACTERS],
            request=self.request,
        )


@dataclass(slots=True, eq=False)
class Link:
    """State of an engine that survives its removal from a publisher.

    Attributes:
        mutex: Serialises deliveries and polls.
        polling: The poll that holds the mutex; a delivery ends it.
        unfinished: Tasks besides the attempts, such as resuming the engine.
        is_left_paused: Whether the engine was left paused, because its weights may be half replaced.
        is_in_doubt: Whether an update of its weights has begun since it last confirmed a version.
    """

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    polling: asyncio.Future[Any] | None = None
    unfinished: set[asyncio.Task[None]] = field(default_factory=set)
    is_left_paused: bool = False
    is_in_doubt: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a delivery, a poll or another task uses the engine."""
        return self.mutex.locked() or bool(self.unfinished)


class EngineConnection:
    """HTTP with one engine. Used on one event loop.

    Args:
        session: A session without timeouts: every wait has its own deadline.
        engine: The engine; provides the base URL, and the headers of each request.
        link: The engine's state that survives its removal.
        serving: Versions that the engine has reported to serve; changed here.

    Attributes:
        url: Base URL of the engine.
        link: The engine's state that survives its removal.
        serving: Versions that the engine has reported to serve.
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
            EngineRefusedError: The status reports a failure.
        """
        return await self._request("GET", path, params, None)

    async def post(self, path: str, body: Mapping[str, object] | None = None, **params: str) -> Answer:
        """Send a POST request with a JSON body; raises as `get`."""
        return await self._request("POST", path, params, body)

    async def pause(self, path: str, body: Mapping[str, object] | None = None, *, advice: str, **params: str) -> Answer:
        """Pause the engine by a POST, inside `resuming`; raises as `get`.

        Args:
            path: The route.
            body: As for `post`.
            advice: Advice to the user if the engine lacks the route; then it was not paused, and is not resumed.
            **params: As for `post`.
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
        """Resume an engine that is paused inside, also after the deadline; unless `replacing` has not ended.

        Args:
            resume: Resumes the engine.
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
            # A task of its own: only the next attempt waits for it, not the caller that waits for the outcome.
            task = asyncio.get_running_loop().create_task(self._resume_late(resume))
            self.link.unfinished.add(task)
            task.add_done_callback(self.link.unfinished.discard)
            raise

    def afterwards(self, work: Coroutine[Any, Any, None]) -> None:
        """Start background work; it is cancelled when the publisher is closed."""

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
        """Mark the engine's weights as being replaced inside; its version is unknown until it confirms one.

        Args:
            stays_paused: Whether the weights are usable only if the block completes. vLLM's parameters have no memory
                meanwhile: the first request after a resume would crash the engine
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
                # A refusal counts even if its body is incomplete.
                patience_s = 2.0 if status >= 300 else None
                await asyncio.wait_for(_read(response.content, data), patience_s)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError, OSError) as error:
            if status is None or status < 300:
                raise EngineUnreachableError(
                    f"expected a connection for {request}: {type(error).__name__}: {error}", peer=self.url
                ) from error
        except (aiohttp.ClientError, LookupError, ValueError) as error:
            raise EngineRefusedError(
                f"expected an HTTP answer to {request}: {type(error).__name__}: {error}", request=request, status=status
            ) from error
        answer = Answer(request, status, data.decode("utf-8", "replace"))
        if answer.status >= 300:
            raise answer.refusal("expected the engine to do it")
        return answer


class _NotPausedError(EngineRefusedError):
    """The engine cannot be paused, and so need not be resumed."""


async def _read(content: aiohttp.StreamReader, data: bytearray) -> None:
    while len(data) < _MAX_BODY_BYTES and (chunk := await content.readany()):
        data += chunk


@runtime_checkable
class Engine(Protocol):
    """One inference engine.

    An engine that applies more than plain LoRA (``lora_alpha / r * B @ A`` on the unmodified base) declares it by an
    attribute ``adapter_features``: names of fields of PEFT's ``LoraConfig``, such as ``use_dora``, and
    ``lora_embedding``; ``None`` if PEFT itself reads the files. The publisher refuses an adapter with other features.

    Attributes:
        url: Base URL of the engine; reports name the engine by it.
        headers: Sent with each request, such as ``Authorization``.
    """

    url: str
    headers: Mapping[str, str]

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Makes the engine use a version; idempotent.

        Returns:
            The version that the engine confirms to use.

        Raises:
            EngineUnreachableError: The delivery is retried.
            EngineRefusedError: The delivery is not retried.
        """
        ...


@runtime_checkable
class PolledEngine(Engine, Protocol):
    """An engine that reports its version, and so gets the newest version again when it has lost it."""

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """Returns the version that the engine serves now. Called while no delivery runs; changes nothing.

        Args:
            connection: Connection to the engine.
            newest: The newest version: the engine reports a version of the same kind; earlier versions have directories
                beside this one's.

        Returns:
            ``None`` if the engine serves none of this publisher's versions.

        Raises:
            EngineUnreachableError: The poll is repeated later.
            EngineRefusedError: The poll is repeated later. With a status of `NO_ROUTE`: the engine runs, but cannot
                report its version.
        """
        ...


def checked_url(url: str) -> str:
    """Return the base URL of an engine, without a slash at its end.

    Raises:
        ConfigurationError: The value is not a base URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigurationError(f"expected the base URL of an engine, http://host:port, got {url!r}")
    return url.rstrip("/")


def weight_version(answer: Answer) -> int | None:
    """Return the version in an answer, ``None`` if it is not a published one, as before the first.

    Raises:
        EngineRefusedError: The answer is not JSON.
    """
    fields = answer.json()
    version = fields.get("weight_version") if isinstance(fields, dict) else None
    if not isinstance(version, str) or not version.isdecimal() or len(version) > 18:
        return None
    return int(version)


def confirmed_weight_version(answer: Answer, expected: int) -> int:
    """Return the version in an answer.

    Raises:
        EngineRefusedError: The answer has no published version.
    """
    version = weight_version(answer)
    if version is None:
        raise answer.refusal(f"expected weight_version {expected}")
    return version
