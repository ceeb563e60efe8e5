"""Fetches the delta from one version to a later one."""

from __future__ import annotations

from ft_transport.errors import StepNotServedError
from ft_transport.http.connection import Connection
from ft_transport.wire.routes import DELTA_ROUTE


def fetch_delta(connection: Connection, base: int, *, max_bytes: int) -> bytearray | None:
    """Fetch the delta that a peer caches for receivers that have ``base``.

    Args:
        connection: Connection to the peer.
        base: The receiver's step.
        max_bytes: Maximum size; a larger delta is not fetched.

    Returns:
        The encoded delta; ``None`` if the peer has none, or only a larger one.

    Raises:
        PeerError: The peer cannot be reached, or refuses.
        DeadlineExceededError: The delta did not come in time.
    """
    try:
        response = connection.get(DELTA_ROUTE.format(step=base), headers={}, expected_status=200, answer_within_s=0.0)
    except StepNotServedError:
        return None
    length = response.length
    if not length or length > max_bytes:
        connection.close()
        return None
    return connection.read_body(response, max_bytes=max_bytes)
