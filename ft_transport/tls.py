"""The TLS certificate of a process, and the authority that signs the certificates of its peers.

The process presents the same certificate as a server and as a client. Server and client both refuse a peer without a
certificate (mutual TLS, RFC 8446, section 4.4.2).
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
"""Environment variable: PEM file with this process's certificate and its intermediate certificates."""
KEY_VARIABLE: Final = "FT_TRANSPORT_TLS_KEY"
"""Environment variable: PEM file with the private key of this process's certificate, without a passphrase."""
AUTHORITY_VARIABLE: Final = "FT_TRANSPORT_TLS_CA"
"""Environment variable: PEM file with the authorities that sign the certificates of the job's peers."""
VERIFY_VARIABLE: Final = "FT_TRANSPORT_TLS_VERIFY"
"""Environment variable: ``name`` or ``chain``, the value of `TLSFiles.verify`."""

Verify: TypeAlias = Literal["name", "chain"]

_CHECK_EVERY_S: Final = 1.0
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers for TLS 1.2 that have forward secrecy and authenticated encryption, as all ciphers of TLS 1.3 do."""

_Versions: TypeAlias = tuple[tuple[int, int, int], ...]
_Contexts: TypeAlias = tuple[ssl.SSLContext, ssl.SSLContext]


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSFiles:
    """The PEM files for TLS: this process's certificate, its key, and the authority for its peers' certificates.

    The process rereads the files when they change.

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

    Args:
        files: The files of the certificate, its key and the authority.

    Attributes:
        files: The files of the certificate, its key and the authority.

    Raises:
        ConfigurationError: A file cannot be read, or the key does not match the certificate.
    """

    def __init__(self, files: TLSFiles) -> None:
        self.files = files
        self._mutex = threading.Lock()
        self._versions = _versions_of(files)
        self._contexts = _load(files)
        self._checked_s = time.monotonic()
        self._failure = ""

    def for_server(self) -> ssl.SSLContext:
        """Return the context with which a server accepts a new connection."""
        return self._current()[0]

    def for_client(self) -> ssl.SSLContext:
        """Return the context with which a client opens a new connection."""
        return self._current()[1]

    def _current(self) -> _Contexts:
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_EVERY_S:
            return self._contexts
        with self._mutex:
            if now_s - self._checked_s >= _CHECK_EVERY_S:
                self._checked_s = now_s
                self._reread()
        return self._contexts

    def _reread(self) -> None:
        try:
            seen = _versions_of(self.files)
            if seen != self._versions:
                # Raises if only some of the files are renewed yet, because key and certificate do not match.
                self._contexts = _load(self.files)
                self._versions = seen
                logger.info("the certificate in %s was renewed", self.files.certificate)
            self._failure = ""
        except ConfigurationError as error:
            if self._failure != (failure := str(error)):
                self._failure = failure
                logger.warning("the certificate stays as it was: %s", failure)

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
