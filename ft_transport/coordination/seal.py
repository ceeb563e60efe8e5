"""Signatures of what ranks tell each other through a key-value store, to which whoever reaches it may write."""

from __future__ import annotations

from typing import Final

from ft_transport.errors import PeerProtocolError
from ft_transport.keys import TOKEN_VARIABLE, Keys

_PURPOSE: Final = "told among ranks"
_END: Final = b" "


class Seal:
    """Signs messages and opens them. Without keys they stay as they are. Thread-safe.

    Args:
        keys: Of the job token, if there is one.
        context: What all messages are about; the same on all ranks.
    """

    def __init__(self, keys: Keys | None, *context: str) -> None:
        self._keys = keys
        self._context = tuple(part.encode() for part in context)

    def sealed(self, message: bytes, *place: str) -> bytes:
        """The message with its signature.

        Args:
            message: What is told.
            place: Where it belongs: it is no message anywhere else.
        """
        if self._keys is None:
            return message
        return self._keys.sign(_PURPOSE, *self._parts(message, place)).encode() + _END + message

    def opened(self, sealed: bytes, *place: str) -> bytes:
        """The inverse of `sealed`.

        Raises:
            PeerProtocolError: No rank of this job has told this, here.
        """
        if self._keys is None:
            return sealed
        signature, end, message = sealed.partition(_END)
        parts = self._parts(message, place)
        if not end or not self._keys.verifies(signature.decode("ascii", "replace"), _PURPOSE, *parts):
            raise PeerProtocolError(
                f"expected {' '.join(place)} to be signed with the job token ({TOKEN_VARIABLE}): another one is used, "
                "or somebody else writes to the store"
            )
        return message

    def _parts(self, message: bytes, place: tuple[str, ...]) -> tuple[bytes, ...]:
        return (*self._context, *(part.encode() for part in place), message)
