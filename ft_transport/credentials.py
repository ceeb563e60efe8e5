"""The credentials of a process: the job token, and the TLS certificate.

The job token is a secret of all processes of a job, by which they authenticate each other without sending it. PBKDF2
(RFC 8018, section 5.2) derives a key from the token. The derivation is slow, so an attacker who has recorded messages
can test only a few guessed tokens per second.

A process presents the same certificate as a server and as a client. Server and client both refuse a peer without a
certificate (mutual TLS, RFC 8446, section 4.4.2).

Both credentials may come from files, which the process reads again when they change.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, NoReturn, TypeAlias, TypeVar

from ft_transport.errors import ConfigurationError
from ft_transport.wire.signing import Bytes, Key, is_equal

logger = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "FT_TRANSPORT_TOKEN"
"""Environment variable with the token. Without a token, peers are not authenticated."""
TOKEN_FILE_VARIABLE: Final = "FT_TRANSPORT_TOKEN_FILE"
"""Environment variable with the path of a file that contains the token; the process rereads a changed file."""

_SALT: Final = b"ft_transport/key"
_WATCHING: Final = "watching"
_ROUNDS: Final = 200_000
_MAX_TOKENS: Final = 2
_MAX_FILE_BYTES: Final = 4096


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
        self._keys = _Reloading(
            "the job token", read, _keys_of, lambda keys: f"the key {keys[0].key_id} signs from now on"
        )

    @classmethod
    def of(cls, token: str) -> Keys:
        """Return the keys for ``token``, which is one token, or two tokens separated by a space.

        Raises:
            ConfigurationError: The text is empty, has more than two tokens, or has characters other than visible ASCII.
        """
        return cls(lambda: token)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Keys:
        """Return the keys for a file with one token, or two separated by white space. The file may change later.

        Raises:
            ConfigurationError: The file cannot be read, or contains no valid tokens.
        """
        return cls(functools.partial(_file_text, Path(path)))

    @classmethod
    def from_environment(cls) -> Keys | None:
        """Return the keys for the token in the environment; ``None`` if neither of the two variables is set.

        Raises:
            ConfigurationError: Both variables are set, or the one that is set yields no valid token. Without this
                error, a server whose secret was lost would run without authentication.
        """
        token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
        if token is not None and path is not None:
            raise ConfigurationError(
                f"expected either {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}, but both are set; unset one, even if empty"
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
        return self._keys.current()

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

    def __repr__(self) -> str:
        return f"Keys({', '.join(key.key_id for key in self.current())})"


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


CERTIFICATE_VARIABLE: Final = "FT_TRANSPORT_TLS_CERT"
"""Environment variable: PEM file with this process's certificate and its intermediate certificates."""
KEY_VARIABLE: Final = "FT_TRANSPORT_TLS_KEY"
"""Environment variable: PEM file with the private key of this process's certificate, without a passphrase."""
AUTHORITY_VARIABLE: Final = "FT_TRANSPORT_TLS_CA"
"""Environment variable: PEM file with the authorities that sign the certificates of the job's peers."""
VERIFY_VARIABLE: Final = "FT_TRANSPORT_TLS_VERIFY"
"""Environment variable: ``name`` or ``chain``, the value of `TLSFiles.verify`."""

Verify: TypeAlias = Literal["name", "chain"]

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers for TLS 1.2 that have forward secrecy and authenticated encryption, as all ciphers of TLS 1.3 do."""

_Versions: TypeAlias = tuple[tuple[int, int, int], ...]
_Contexts: TypeAlias = tuple[ssl.SSLContext, ssl.SSLContext]


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSFiles:
    """The PEM files for TLS. The process rereads the files when they change.

    Attributes:
        certificate: File with this process's certificate and its intermediate certificates. The process uses the
            certificate both as a server and as a client, so its extended key usage must name both or be absent.
        key: File with the private key of the certificate, without a passphrase.
        authority: File with the authorities that sign the certificates of the job's peers. Every process with a
            certificate from these authorities is a member of the job. So name the job's own authority, not the
            system's authorities.
        verify: ``name``: a server's certificate must be valid for the host or address in the server's URL. ``chain``: a
            valid signature of the authority is enough; for certificates without host names.

    Raises:
        ConfigurationError: A path or ``verify`` is invalid.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str]
    verify: Verify = "name"

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            path = getattr(self, name)
            if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                raise ConfigurationError(f"expected the path of a file as {name} of TLS, got {path!r}"[:200])
        if self.verify not in ("name", "chain"):
            raise ConfigurationError(f"expected 'name' or 'chain' as verify of TLS, got {self.verify!r}"[:200])

    @classmethod
    def from_environment(cls) -> TLSFiles | None:
        """Return the files that the environment variables name; ``None`` if no variable is set.

        Raises:
            ConfigurationError: Only some of the three files are named. Without this error, a server whose variable was
                lost would run without TLS.
        """
        variables = (CERTIFICATE_VARIABLE, KEY_VARIABLE, AUTHORITY_VARIABLE)
        found = [os.environ.get(variable) for variable in variables]
        verify = os.environ.get(VERIFY_VARIABLE)
        if not any(value is not None for value in (*found, verify)):
            return None
        certificate, key, authority = found
        if not certificate or not key or not authority:
            unset = [variable for variable, value in zip(variables, found, strict=True) if not value]
            raise ConfigurationError(f"expected {', '.join(variables)} to be set together, unset: {', '.join(unset)}")
        # The constructor checks the value of ``verify``.
        return cls(certificate=certificate, key=key, authority=authority, verify=verify or "name")  # type: ignore[arg-type]


class Certificates:
    """The TLS contexts of a process, for its servers and clients. Thread-safe.

    The files may be renewed at any time: new connections use the new files, and open connections continue.

    Attributes:
        files: The files of the certificate, its key and the authority.

    Raises:
        ConfigurationError: A file cannot be read, or the key does not match the certificate.
    """

    def __init__(self, files: TLSFiles) -> None:
        self.files = files
        self._contexts = _Reloading(
            "the certificate",
            functools.partial(_versions_of, files),
            lambda _versions: _load(files),
            lambda _contexts: os.fspath(files.certificate),
        )

    def for_server(self) -> ssl.SSLContext:
        """Return the context with which a server accepts a new connection."""
        return self._contexts.current()[0]

    def for_client(self) -> ssl.SSLContext:
        """Return the context with which a client opens a new connection."""
        return self._contexts.current()[1]

    def __repr__(self) -> str:
        return f"Certificates({os.fspath(self.files.certificate)!r})"


def _versions_of(files: TLSFiles) -> _Versions:
    """Return inode, size and modification time of each file, which change if a file or the target of a link changes."""
    seen = []
    for path in (files.certificate, files.key, files.authority):
        try:
            status = Path(path).stat()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        seen.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(seen)


def _load(files: TLSFiles) -> _Contexts:
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        _load_into(context, files)
        context.check_hostname = files.verify == "name" and context is contexts[1]
        context.verify_mode = ssl.CERT_REQUIRED
    # No session tickets: a resumed session would stay valid after its certificates have expired.
    contexts[0].options |= ssl.OP_NO_TICKET
    contexts[0].num_tickets = 0
    return contexts


def _load_into(context: ssl.SSLContext, files: TLSFiles) -> None:
    def refuse_to_ask() -> NoReturn:
        # Otherwise OpenSSL would ask for the passphrase at the terminal and wait.
        raise ConfigurationError(f"expected a private key without a passphrase in {os.fspath(files.key)}")

    for path in (files.certificate, files.key, files.authority):
        try:
            Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
    try:
        context.load_cert_chain(files.certificate, files.key, password=refuse_to_ask)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"expected a certificate in {os.fspath(files.certificate)} and its private key in {os.fspath(files.key)}, "
            f"both in PEM format: {_reason(error)}"
        ) from error
    try:
        context.load_verify_locations(files.authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"expected certificates of authorities in PEM format in {os.fspath(files.authority)}: {_reason(error)}"
        ) from error


def _unreadable(path: str | os.PathLike[str], error: Exception) -> ConfigurationError:
    return ConfigurationError(f"cannot read the TLS file {os.fspath(path)}: {type(error).__name__}")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else type(error).__name__


_CHECK_EVERY_S: Final = 1.0

_Seen = TypeVar("_Seen")
_Loaded = TypeVar("_Loaded")


class _Reloading(Generic[_Seen, _Loaded]):
    """A value that is loaded from files, and loaded again when they change. Thread-safe.

    If changed files are invalid, the old value stays, with a warning; each check tries again.

    Args:
        name: Name of the value, for the log.
        look: Returns something that differs after a file has changed. Called at most once a second.
        load: Loads the value, given the result of ``look``.
        describe: Returns what to log about a new value.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], _Seen],
        load: Callable[[_Seen], _Loaded],
        describe: Callable[[_Loaded], str],
    ) -> None:
        self._name = name
        self._look = look
        self._load = load
        self._describe = describe
        self._mutex = threading.Lock()
        self._seen = look()
        self._value = load(self._seen)
        self._checked_s = time.monotonic()
        self._failure = ""

    def current(self) -> _Loaded:
        """Return the value. If the last check was a second ago or more, check first whether the files have changed."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_EVERY_S:
            return self._value
        with self._mutex:
            if now_s - self._checked_s >= _CHECK_EVERY_S:
                self._checked_s = now_s
                self._check()
        return self._value

    def _check(self) -> None:
        try:
            seen = self._look()
            if seen != self._seen:
                # Raises if only some of the files are renewed yet: key and certificate do not match.
                self._value = self._load(seen)
                self._seen = seen
                logger.info("%s was replaced: %s", self._name, self._describe(self._value))
            self._failure = ""
        except ConfigurationError as error:
            if self._failure != (failure := str(error)):
                self._failure = failure
                logger.warning("%s stays as it was: %s", self._name, failure)
