"""Asking a peer for what leads from one version to a later one."""

from __future__ import annotations

from ft_transport.errors import StepNotServedError
from ft_transport.http.connection import Connection
from ft_transport.wire.routes import DELTA_ROUTE


def fetch_delta(connection: Connection, base: int, *, max_bytes: int) -> bytearray | None:
    """The delta that a peer keeps for those who have ``base``.

    Args:
        connection: To the peer.
        base: The step that the receiver has.
        max_bytes: A larger one is left where it is.

    Returns:
        The delta, encoded; ``None`` if the peer has none, or a larger one.

    Raises:
        PeerError: The peer cannot be reached, or refuses.
        DeadlineExceededError: It did not come in time.
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
