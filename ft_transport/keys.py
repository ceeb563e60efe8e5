"""The job token: a secret of all processes of a job, by which they authenticate each other without sending it.

PBKDF2 (RFC 8018, section 5.2) derives a key from the token. The derivation is slow, so an attacker who has recorded
messages can test only few guessed tokens per second.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ft_transport.errors import ConfigurationError
from ft_transport.wire.signing import Bytes, Key, is_equal

logger = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "FT_TRANSPORT_TOKEN"
"""Environment variable with the token. Without one, peers are not authenticated."""
TOKEN_FILE_VARIABLE: Final = "FT_TRANSPORT_TOKEN_FILE"
"""Environment variable with the path of a file that contains the token; the process rereads a changed file."""

_SALT: Final = b"ft_transport/key"
_WATCHING: Final = "watching"
_ROUNDS: Final = 200_000
_MAX_TOKENS: Final = 2
_MAX_FILE_BYTES: Final = 4096
_CHECK_EVERY_S: Final = 1.0


class Keys:
    """The keys of a job: the first key signs messages, and every key verifies messages. Thread-safe.

    While a token is being replaced, a job has two keys. Every process first accepts the new key, then signs with the
    new key, and finally drops the old key. Processes need not take these steps at the same time.

    Args:
        read: Returns the text with the tokens. Called again at most once a second, to detect a replaced token.

    Raises:
        ConfigurationError: The text has no valid tokens.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._mutex = threading.Lock()
        self._text = read()
        self._keys = _keys_of(self._text)
        self._checked_s = time.monotonic()
        self._failure = ""

    @classmethod
    def of(cls, token: str) -> Keys:
        """Return the keys for a text of one token, or of two tokens separated by a space.

        Raises:
            ConfigurationError: The text is empty, has more than two tokens, or has characters other than visible ASCII.
        """
        return cls(lambda: token)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Keys:
        """Return the keys for a file of one or two tokens, separated by white space; the file may change at any time.

        Raises:
            ConfigurationError: The file cannot be read, or contains no valid tokens.
        """
        return cls(functools.partial(_file_text, Path(path)))

    @classmethod
    def from_environment(cls) -> Keys | None:
        """Return the keys for the environment variables; ``None`` if neither variable is set.

        Raises:
            ConfigurationError: A variable is set but gives no valid token, or both are set. Without this error, a
                server whose secret was lost would run without authentication.
        """
        token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
        if token is not None and path is not None:
            raise ConfigurationError(
                f"expected either {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}, both are set; unset one, even if empty"
            )
        if path is not None:
            return cls.from_file(path)
        if token == "":
            raise ConfigurationError(
                f"expected a job token in {TOKEN_VARIABLE}, got an empty value; unset it to use no token"
            )
        return cls.of(token) if token is not None else None

    def current(self) -> tuple[Key, ...]:
        """Return the current keys, the signing key first. If the new token is invalid, warn and keep the old keys."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_EVERY_S:
            return self._keys
        with self._mutex:
            if now_s - self._checked_s >= _CHECK_EVERY_S:
                self._checked_s = now_s
                self._reread()
        return self._keys

    def sign(self, purpose: str, *parts: Bytes) -> str:
        """Return a signature of the parts: the id of the signing key, a colon and 64 hexadecimal digits."""
        key = self.current()[0]
        return f"{key.key_id}:{key.mac(purpose, *parts).hex()}"

    def verifies(self, signature: str | None, purpose: str, *parts: Bytes) -> bool:
        """Return whether the signature of the parts is by one of the keys. Compares in constant time."""
        key = self.with_id((signature or "").partition(":")[0])
        if key is None or signature is None or not signature.isascii():
            return False
        return is_equal(signature, f"{key.key_id}:{key.mac(purpose, *parts).hex()}")

    def with_id(self, key_id: str) -> Key | None:
        """Return the key with this id, or ``None``."""
        return next((key for key in self.current() if key.key_id == key_id), None)

    def watch_tokens(self) -> tuple[str, ...]:
        """Return the watch token of each key, the signing key's first.

        A watch token gives access to monitoring only, and does not reveal the key. Browsers and Prometheus send it in
        plain text; the job token itself is never sent.
        """
        return tuple(key.mac(_WATCHING).hex() for key in self.current())

    def _reread(self) -> None:
        try:
            text = self._read()
            if text != self._text:
                self._text = text
                self._keys = _keys_of(text)
                logger.info("the job token was replaced; the key %s signs from now on", self._keys[0].key_id)
            self._failure = ""
        except ConfigurationError as error:
            if self._failure != (failure := str(error)):
                self._failure = failure
                logger.warning("the job token stays as it was: %s", failure)

    def __repr__(self) -> str:
        return f"Keys({', '.join(key.key_id for key in self._keys)})"


def _keys_of(text: str) -> tuple[Key, ...]:
    tokens = text.split() if text.isascii() else [text]
    # Only visible ASCII, to detect common mistakes in a file or variable: typographic quotation marks, escapes.
    if not 0 < len(tokens) <= _MAX_TOKENS or not all(
        "!" <= character <= "~" for token in tokens for character in token
    ):
        raise ConfigurationError(
            f"expected a job token of visible ASCII characters, or two with white space between them, got {len(tokens)}"
            + (" or other characters" if tokens else "")
        )
    return tuple(Key.of(_stretched(token.encode())) for token in tokens)


@functools.lru_cache(maxsize=8)
def _stretched(token: bytes) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", token, _SALT, _ROUNDS)


def _file_text(path: Path) -> str:
    try:
        # O_NONBLOCK, because opening a FIFO would wait for a writer; a regular file ignores the flag (open(2)).
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigurationError(
                    f"expected a regular file with a job token at {path}, got another kind of file"
                )
            content = os.read(descriptor, _MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigurationError(
                f"expected a file of at most {_MAX_FILE_BYTES} bytes with a job token at {path}, got a larger one"
            )
        return content.decode("ascii")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"expected a file with a job token at {path}: {type(error).__name__}") from error
