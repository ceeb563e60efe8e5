"""What an inference engine has to be able to do, and how it is spoken to. Another engine is one file like ``vllm``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, runtime_checkable

import aiohttp

from ft_transport.errors import EngineRefusedError, EngineUnreachableError

_MAX_BODY_BYTES: Final = 1 << 20
_MAX_SHOWN_CHARACTERS: Final = 2000
_RESUME_TIMEOUT_S: Final = 10.0

Kind = Literal["adapter", "weights"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version that lies on disk, complete and never changed again.

    Attributes:
        version: Its number.
        kind: ``adapter``: a LoRA adapter in PEFT's layout. ``weights``: all weights of a model, safetensors.
        directory: Where it lies, on a file system that the engine sees under the same path.
        address: Makes sure that it is served over HTTP, and returns where; ``None`` where nothing serves it.
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
        body: Its text, whatever its type.
    """

    request: str
    status: int
    body: str

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            EngineRefusedError: It is none.
        """
        try:
            return json.loads(self.body)
        except ValueError:
            raise self.refusal("expected an answer in JSON") from None

    def refusal(self, message: str) -> EngineRefusedError:
        """An error that says what was expected, and what this answer says instead."""
        return EngineRefusedError(
            f"{message}; {self.request} answered {self.status}: {self.body[:_MAX_SHOWN_CHARACTERS]}",
            status=self.status,
            body=self.body[:_MAX_SHOWN_CHARACTERS],
            request=self.request,
        )


class EngineConnection:
    """HTTP with one engine. Belongs to one event loop.

    Args:
        session: Its timeouts are off: whoever waits has a deadline.
        url: Base URL of the engine.
        headers: Sent with each request.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._session = session
        self._headers = dict(headers)
        self.unfinished: set[asyncio.Task[None]] = set()

    async def get(self, path: str, **params: str) -> Answer:
        """Asks.

        Raises:
            EngineUnreachableError: No connection, or it broke.
            EngineRefusedError: The status says that it failed.
        """
        return await self._request("GET", path, params, None)

    async def post(self, path: str, body: Mapping[str, object] | None = None, **params: str) -> Answer:
        """Asks with a JSON body; raises as `get`."""
        return await self._request("POST", path, params, body)

    @contextlib.asynccontextmanager
    async def resuming(self, resume: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """An engine that is paused inside is resumed, whatever happens; also after the deadline has run out.

        Args:
            resume: Resumes it.
        """
        try:
            yield
        except BaseException:

            async def resume_late() -> None:
                with contextlib.suppress(
                    EngineRefusedError, EngineUnreachableError, TimeoutError, asyncio.TimeoutError
                ):
                    await asyncio.wait_for(resume(), _RESUME_TIMEOUT_S)

            # On its own: who is waiting for the outcome need not wait for this.
            task = asyncio.get_running_loop().create_task(resume_late())
            self.unfinished.add(task)
            task.add_done_callback(self.unfinished.discard)
            raise
        await resume()

    async def _request(
        self, method: str, path: str, params: Mapping[str, str], body: Mapping[str, object] | None
    ) -> Answer:
        url = f"{self.url}{path}"
        request = f"{method} {url}"
        try:
            async with self._session.request(
                method, url, params=params or None, json=body, headers=self._headers, allow_redirects=False
            ) as response:
                data = bytearray()
                while len(data) < _MAX_BODY_BYTES and (chunk := await response.content.readany()):
                    data += chunk
                text = data.decode(response.get_encoding() if response.charset else "utf-8", "replace")
                answer = Answer(request, response.status, text)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise EngineUnreachableError(
                f"expected a connection for {request}: {type(error).__name__}: {error}", peer=self.url
            ) from error
        except (aiohttp.ClientError, LookupError, ValueError) as error:
            raise EngineRefusedError(
                f"expected an HTTP answer to {request}: {type(error).__name__}: {error}", request=request
            ) from error
        if answer.status >= 300:
            raise answer.refusal("expected the engine to do it")
        return answer


@runtime_checkable
class Engine(Protocol):
    """One inference engine.

    Attributes:
        url: Its base URL, by which reports name it.
        headers: Sent with each request, such as ``Authorization``.
    """

    url: str
    headers: Mapping[str, str]

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Makes the engine use a version; doing it twice does no harm.

        Returns:
            The version that the engine confirms to use.

        Raises:
            EngineUnreachableError: It is tried again.
            EngineRefusedError: It is not.
        """
        ...
