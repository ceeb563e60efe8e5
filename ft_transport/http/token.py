"""The job token: who may read the weights of this job."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Final

from ft_transport.errors import ConfigurationError

TOKEN_VARIABLE: Final = "FT_TRANSPORT_TOKEN"
"""Environment variable: the secret that every process of a job shares. Unset, no token is asked for."""


class JobToken:
    """A shared secret that cannot be printed by accident.

    Raises:
        ConfigurationError: It is empty, or holds what a header cannot carry: anything but visible ASCII.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        # A header would carry other characters in one encoding and be read in another, and never match.
        if not secret or not all("!" <= character <= "~" for character in secret):
            raise ConfigurationError(
                "expected a job token of visible ASCII characters, got one that is empty or holds others (white space, "
                "a line end)"
            )
        self._secret = secret.encode()

    @classmethod
    def from_environment(cls) -> JobToken | None:
        """The token that the environment sets, or ``None``.

        Raises:
            ConfigurationError: It cannot be a token, or is empty: a secret that was not found must not open the server.
        """
        secret = os.environ.get(TOKEN_VARIABLE)
        if secret == "":
            raise ConfigurationError(
                f"expected a job token in {TOKEN_VARIABLE}, it is set and empty; unset it for none"
            )
        return cls(secret) if secret is not None else None

    def header(self) -> str:
        """Value of the ``Authorization`` header (RFC 6750, section 2.1)."""
        return f"Bearer {self._secret.decode()}"

    def accepts(self, header: str | None) -> bool:
        """Whether an ``Authorization`` header carries this token; takes the same time wherever they differ."""
        given = (header or "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self.header().encode())

    def proof(self) -> str:
        """Equal for equal tokens, and as slow to try out as scrypt makes it; may be seen. Empty without scrypt."""
        try:
            return hashlib.scrypt(self._secret, salt=b"ft_transport/token", n=1 << 14, r=8, p=1, dklen=8).hex()
        except (AttributeError, ValueError):  # an OpenSSL without it, or that may not use it
            return ""

    def __repr__(self) -> str:
        return "JobToken(…)"
