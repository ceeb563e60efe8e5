"""What a publisher knows of one engine. Changed on the loop that notifies engines; any thread may look."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ft_transport.publish.engines.engine import Engine, EngineConnection
from ft_transport.publish.report import EngineState, Outcome


@dataclass(slots=True, eq=False)
class Link:
    """What exists once for an engine, also where it is removed and added again.

    Attributes:
        mutex: Taken by one delivery, or one poll, after the other.
        asking: The poll that holds the mutex; a delivery ends it.
        unfinished: What goes on beside the attempts, such as resuming the engine.
        is_left_paused: See `EngineConnection`.
        is_in_doubt: See `EngineConnection`.
    """

    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    asking: asyncio.Future[Any] | None = None
    unfinished: set[asyncio.Task[None]] = field(default_factory=set)
    is_left_paused: bool = False
    is_in_doubt: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether somebody speaks with the engine."""
        return self.mutex.locked() or bool(self.unfinished)


@dataclass(slots=True, eq=False)
class KnownEngine:
    """One engine, from when it is added until it is removed.

    Attributes:
        engine: The engine.
        link: To it.
        version: The version that it confirmed last, or was found to serve; ``None`` if it serves none, or never said.
        has_said: Whether it ever said which.
        is_counted: Whether it confirmed the last version that it was notified of.
        outcome: Of the last delivery; ``None`` before the first.
        doubtful: Versions that it may have begun to load, and not confirmed; the latest few.
        loading: The version that is being delivered.
        serving: Versions that it lists as served, beside the one that it confirmed.
        newest: The newest version that it is to be notified of.
        failure: What went wrong with the last delivery.
        poll_failure: What went wrong when it was asked last.
        was_down: Whether it could not be asked since the last delivery.
        is_removed: Whether it was.
        tasks: Deliveries that wait or are under way.
        watching: Polls it.
    """

    engine: Engine
    link: Link
    version: int | None = None
    has_said: bool = False
    is_counted: bool = True
    outcome: Outcome | None = None
    doubtful: tuple[int, ...] = ()
    loading: int | None = None
    serving: set[int] = field(default_factory=set)
    newest: int = -1
    failure: str = ""
    poll_failure: str = ""
    was_down: bool = False
    is_removed: bool = False
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return self.engine.url

    @property
    def used(self) -> int | None:
        """The version that it is known to use."""
        return None if self.link.is_in_doubt else self.version

    def connection(self, session: aiohttp.ClientSession) -> EngineConnection:
        """A connection that shares what is known of the engine."""
        connection = EngineConnection(session, self.engine.url, self.engine.headers)
        connection.unfinished = self.link.unfinished
        connection.serving = self.serving
        connection.is_left_paused = self.link.is_left_paused
        connection.is_in_doubt = self.link.is_in_doubt
        return connection

    def versions_in_use(self) -> set[int] | None:
        """Versions that it may be using; ``None`` if that may be any."""
        if not self.has_said:
            return None
        versions = {*self.doubtful, *self.serving}
        return versions | {each for each in (self.version, self.loading) if each is not None}

    def state(self) -> EngineState:
        """What a user is shown."""
        return EngineState(
            url=self.url,
            version=self.used,
            is_counted=self.is_counted,
            outcome=self.outcome if self.outcome is not None and not self.tasks else "pending",
            error=self.poll_failure or self.failure,
        )
