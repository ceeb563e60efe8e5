"""Snapshots of one step from two replicas of a running job: both are asked at once for a future step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Final

from ft_transport.errors import DeadlineExceededError, StepNotServedError
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import fetch_digests, fetch_manifest
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

_LEAST_PATIENCE_S: Final = 10.0
"""Minimum wait for a future step: the replicas may or may not train."""
_MORE_PATIENCE: Final = 4.0
"""The wait is this many times as long as the newest snapshots took, which also wait for a step boundary."""
_LARGEST_LEAD: Final = 1 << 16

Manifests = tuple[Manifest, Manifest]
SettingsFor = Callable[[float], FetchSettings]
"""Makes the settings of a fetch with a longest silence in seconds, counted from now."""


@contextmanager
def asked_for_one_step(
    peers: tuple[PeerAddress, PeerAddress], step: int | None, *, settings_for: SettingsFor, timeout_s: float
) -> Iterator[Manifests]:
    """Return both manifests with digests, of a common step if possible, otherwise of their newest steps.

    While the context is open, both replicas keep their snapshots, at least for the time of a lease.

    Args:
        peers: The replicas.
        step: The required step; any step by default.
        settings_for: Makes the settings of a fetch.
        timeout_s: Longest silence in seconds.

    Raises:
        TransportError: A replica is unreachable, or does not serve the required step.
    """
    with _Asking(peers, settings_for) as asking:
        if step is not None:
            yield asking.ask(step, timeout_s)
            return
        began_s = time.monotonic()
        manifests = asking.ask(LATEST, timeout_s)
        if manifests[0].step != manifests[1].step:
            took_s = time.monotonic() - began_s
            patience_s = min(timeout_s, max(_LEAST_PATIENCE_S, _MORE_PATIENCE * took_s))
            steps = [manifest.step for manifest in manifests]
            manifests = (
                _of_the_one_behind(asking, steps)
                or _of_a_step_to_come(asking, steps, patience_s)
                or asking.ask(LATEST, timeout_s)
            )
        yield manifests


def _of_the_one_behind(asking: _Asking, steps: list[int]) -> Manifests | None:
    """Return both manifests of the first replica's step, if the other one still serves that step."""
    try:
        return asking.ask(min(steps), _LEAST_PATIENCE_S)
    except (StepNotServedError, DeadlineExceededError):
        return None


def _of_a_step_to_come(asking: _Asking, steps: list[int], patience_s: float) -> Manifests | None:
    """Ask for steps further and further ahead, until neither replica has passed one; ``None`` if they stand still."""
    newest, until_s, lead = max(steps), time.monotonic() + patience_s, 1
    while lead <= _LARGEST_LEAD and (left_s := until_s - time.monotonic()) > 0:
        try:
            return asking.ask(newest + lead, left_s)
        except DeadlineExceededError:
            return None
        except StepNotServedError as error:
            # The error for a passed step lists the steps served now.
            newest, lead = max(newest, *error.served, 0), 2 * lead
    return None


class _Asking:
    """Asks both replicas; a context manager that closes its connections."""

    def __init__(self, peers: tuple[PeerAddress, PeerAddress], settings_for: SettingsFor) -> None:
        self._peers = peers
        self._settings_for = settings_for
        self._held = ExitStack()

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._held.close()

    def ask(self, step: StepSelector, timeout_s: float) -> Manifests:
        """Ask both at once. The first error ends the other request, too.

        Raises:
            TransportError: A replica did not answer.
        """
        # Earlier snapshots are not needed, and must not keep their places.
        self._held.close()
        settings = self._settings_for(timeout_s)
        connections = [self._held.enter_context(Connection.of(peer, settings)) for peer in self._peers]

        def ask(connection: Connection) -> Manifest:
            manifest = fetch_manifest(connection, step, settings)
            if manifest.digests is not None:
                return manifest
            return replace(manifest, digests=fetch_digests(connection, manifest, max_failures=settings.max_failures))

        answered: SimpleQueue[Future[Manifest]] = SimpleQueue()
        with SafeExecutor(2, "ft-transport-ask") as pool:
            try:
                asked = [pool.submit(ask, connection) for connection in connections]
                for each in asked:
                    each.add_done_callback(answered.put)
                for _ in asked:
                    answered.get().result()
            except BaseException:
                # The other answer is not awaited; the pool ends with it.
                for connection in connections:
                    connection.interrupt()
                raise
        return asked[0].result(), asked[1].result()
