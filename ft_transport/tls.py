"""The certificate with which a process shows who it is, and the authority whose certificates it takes for peers'.

One setting serves both directions: the server shows the certificate to receivers, and this process shows it where it
receives. Either side refuses a peer without one (mutual TLS, RFC 8446, section 4.4.2).
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, TypeAlias

from ft_transport.errors import ConfigurationError

logger = logging.getLogger(__name__)

CERTIFICATE_VARIABLE: Final = "FT_TRANSPORT_TLS_CERT"
"""Environment variable: file with this process's certificate, and those between it and the authority; PEM."""
KEY_VARIABLE: Final = "FT_TRANSPORT_TLS_KEY"
"""Environment variable: file with the private key of that certificate; PEM, without a passphrase."""
AUTHORITY_VARIABLE: Final = "FT_TRANSPORT_TLS_CA"
"""Environment variable: file with the authorities that sign the certificates of the job's peers; PEM."""
VERIFY_VARIABLE: Final = "FT_TRANSPORT_TLS_VERIFY"
"""Environment variable: ``name`` or ``chain``, see `TLSFiles`."""

Verify: TypeAlias = Literal["name", "chain"]

_LOOK_EVERY_S: Final = 1.0
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secrecy and authenticated encryption, as all suites of TLS 1.3 have them."""

_Seen: TypeAlias = tuple[tuple[int, int, int], ...]
_Contexts: TypeAlias = tuple[ssl.SSLContext, ssl.SSLContext]


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSFiles:
    """Where the certificate of this process lies; PEM files, which are read again when they are renewed.

    Attributes:
        certificate: This process's certificate, and those between it and the authority. It serves both as a server's
            and as a client's, so its extended key usage has to name both or be absent.
        key: Its private key, without a passphrase.
        authority: The authorities that sign the certificates of the job's peers. Whoever has a certificate of theirs
            belongs to the job: name the job's own, and not those of the system.
        verify: ``name``: a server's certificate has to be valid for the host or address in its URL. ``chain``: that it
            is signed by the authority is enough, for certificates that carry no host names.

    Raises:
        ConfigurationError: A path or ``verify`` is none.
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
        """The files that the environment names, or ``None``.

        Raises:
            ConfigurationError: It names some of the three alone: a name that was lost must not open a server.
        """
        variables = (CERTIFICATE_VARIABLE, KEY_VARIABLE, AUTHORITY_VARIABLE)
        found = [os.environ.get(variable) for variable in variables]
        verify = os.environ.get(VERIFY_VARIABLE)
        if not any(value is not None for value in (*found, verify)):
            return None
        certificate, key, authority = found
        if not certificate or not key or not authority:
            unset = [variable for variable, value in zip(variables, found, strict=True) if not value]
            raise ConfigurationError(f"expected {', '.join(variables)} together, {' and '.join(unset)} not set")
        # What else it may be is refused with the rest.
        return cls(certificate=certificate, key=key, authority=authority, verify=verify or "name")  # type: ignore[arg-type]


class Certificates:
    """What a process proves itself with over TLS, and checks others with. Thread-safe.

    The files may be renewed at any time: new connections use the new ones, and those that there are go on.

    Args:
        files: Where they lie.

    Attributes:
        files: The same.

    Raises:
        ConfigurationError: They cannot be read, or do not fit together.
    """

    def __init__(self, files: TLSFiles) -> None:
        self.files = files
        self._mutex = threading.Lock()
        self._seen = self._tried = _look_at(files)
        self._contexts = _load(files)
        self._looked_s = time.monotonic()

    def for_server(self) -> ssl.SSLContext:
        """The context of a connection that is accepted now."""
        return self._current()[0]

    def for_client(self) -> ssl.SSLContext:
        """The context of a connection that is made now."""
        return self._current()[1]

    def _current(self) -> _Contexts:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return self._contexts
        with self._mutex:
            if now_s - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = now_s
                self._look_again()
        return self._contexts

    def _look_again(self) -> None:
        try:
            seen = _look_at(self.files)
            if seen == self._seen:
                return
            # Files that have been renewed in part do not fit together, and come again when the rest is there.
            contexts = _load(self.files)
        except ConfigurationError as error:
            if self._tried != (tried := _look_or_nothing(self.files)):
                self._tried = tried
                logger.warning("the certificate stays as it was: %s", error)
            return
        self._seen = self._tried = seen
        self._contexts = contexts
        logger.info("the certificate in %s was renewed", self.files.certificate)

    def __repr__(self) -> str:
        return f"Certificates({os.fspath(self.files.certificate)!r})"


def _look_at(files: TLSFiles) -> _Seen:
    """What changes when a file is replaced or written to, or when a link comes to lead to another one."""
    seen = []
    for path in (files.certificate, files.key, files.authority):
        try:
            status = Path(path).stat()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        seen.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(seen)


def _look_or_nothing(files: TLSFiles) -> _Seen:
    try:
        return _look_at(files)
    except ConfigurationError:
        return ()


def _load(files: TLSFiles) -> _Contexts:
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        _load_into(context, files)
        context.check_hostname = files.verify == "name" and context is contexts[1]
        context.verify_mode = ssl.CERT_REQUIRED
    # A session that is taken up again would outlive the certificates that it began with.
    contexts[0].options |= ssl.OP_NO_TICKET
    contexts[0].num_tickets = 0
    return contexts


def _load_into(context: ssl.SSLContext, files: TLSFiles) -> None:
    def refuse_to_ask() -> NoReturn:
        # OpenSSL would ask at the terminal, and wait.
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
            f"both PEM: {_reason(error)}"
        ) from error
    try:
        context.load_verify_locations(files.authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"expected certificates of authorities in {os.fspath(files.authority)}, PEM: {_reason(error)}"
        ) from error


def _unreadable(path: str | os.PathLike[str], error: Exception) -> ConfigurationError:
    return ConfigurationError(f"expected a file for TLS at {os.fspath(path)}: {type(error).__name__}")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else type(error).__name__
