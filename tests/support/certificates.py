"""Certificates for tests of TLS, made once for each process: an authority of the job, peers, and strangers."""

from __future__ import annotations

import datetime
import functools
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

from ft_transport.credentials import TLSFiles, Verify

HOST = "127.0.0.1"
_DAY = datetime.timedelta(days=1)


@functools.cache
def authority(name: str = "job") -> trustme.CA:
    return trustme.CA(organization_name=name)


@dataclass
class Issued:
    """Files of one process. ``renew`` replaces them as a certificate manager does: each at once, one by one."""

    directory: Path
    verify: Verify = "name"

    @property
    def files(self) -> TLSFiles:
        return TLSFiles(
            certificate=self.directory / "cert.pem",
            key=self.directory / "key.pem",
            authority=self.directory / "ca.pem",
            verify=self.verify,
        )

    def renew(
        self,
        *names: str,
        signed_by: str = "job",
        trusts: str = "job",
        from_days: float = -1.0,
        to_days: float = 30.0,
    ) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        issued = authority(signed_by).issue_cert(
            *(names or (HOST, "localhost")),
            not_before=now + from_days * _DAY,
            not_after=now + to_days * _DAY,
        )
        self._replace("cert.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        self._replace("key.pem", issued.private_key_pem.bytes())
        self._replace("ca.pem", authority(trusts).cert_pem.bytes())

    def _replace(self, name: str, content: bytes) -> None:
        new = self.directory / f"{name}.new"
        new.write_bytes(content)
        new.replace(self.directory / name)


def issue(directory: Path, *names: str, verify: Verify = "name", **how: str | float) -> Issued:
    """Certificate, key and authority of one process, in a directory that is made for them."""
    directory.mkdir(mode=0o700, exist_ok=True)
    issued = Issued(directory, verify)
    issued.renew(*names, **how)  # type: ignore[arg-type]
    return issued


def client_context(issued: Issued) -> ssl.SSLContext:
    """What other software would reach a server with."""
    context = ssl.create_default_context(cafile=os.fspath(issued.files.authority))
    context.load_cert_chain(issued.files.certificate, issued.files.key)
    return context
