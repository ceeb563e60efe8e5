"""The files that a process proves itself with: where they are named, what is refused, and when they are read again."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest
from certificates import Issued, issue
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from ft_transport import ConfigurationError, TLSFiles, TransportSettings, credentials
from ft_transport.credentials import (
    AUTHORITY_VARIABLE,
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    VERIFY_VARIABLE,
    Certificates,
)

VARIABLES = (CERTIFICATE_VARIABLE, KEY_VARIABLE, AUTHORITY_VARIABLE)


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return issue(tmp_path / "peer")


@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_CHECK_EVERY_S", 0.0)


def serial_of(context: ssl.SSLContext) -> object:
    """Tells one certificate of an authority that a context trusts from another."""
    return [each["serialNumber"] for each in context.get_ca_certs()]


def test_both_sides_ask_for_a_certificate_and_take_nothing_older_than_tls_1_2(issued: Issued) -> None:
    certificates = Certificates(issued.files)
    for context in (certificates.for_server(), certificates.for_client()):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert certificates.for_client().check_hostname


def test_the_name_is_checked_unless_the_files_say_otherwise(tmp_path: Path) -> None:
    files = issue(tmp_path / "peer", verify="chain").files
    context = Certificates(files).for_client()
    assert (context.check_hostname, context.verify_mode) == (False, ssl.CERT_REQUIRED)


def test_the_environment_names_the_files(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    files = issued.files
    for variable, path in zip(VARIABLES, (files.certificate, files.key, files.authority), strict=True):
        monkeypatch.setenv(variable, str(path))
    found = TransportSettings().certificates()
    assert found is not None
    assert (str(found.files.key), found.files.verify) == (str(files.key), "name")
    monkeypatch.setenv(VERIFY_VARIABLE, "chain")
    again = TransportSettings().certificates()
    assert again is not None
    assert again.files.verify == "chain"


def test_without_any_there_is_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert TransportSettings().certificates() is None


@pytest.mark.parametrize("named", [VARIABLES[:1], VARIABLES[:2], VARIABLES[1:], (VERIFY_VARIABLE,)])
def test_some_of_the_variables_alone_are_refused(named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in named:
        monkeypatch.setenv(variable, "chain")
    with pytest.raises(ConfigurationError, match="together"):
        TransportSettings().certificates()


def test_an_empty_variable_is_no_way_to_switch_tls_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigurationError, match=CERTIFICATE_VARIABLE):
        TransportSettings().certificates()


@pytest.mark.parametrize("given", [{"certificate": ""}, {"key": None}, {"authority": 3}, {"verify": "none"}])
def test_what_names_no_files_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        TLSFiles(**{"certificate": "a", "key": "b", "authority": "c", **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_files_that_are_missing_or_hold_something_else_are_refused(
    issued: Issued, name: str, content: bytes | None
) -> None:
    path = issued.directory / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=name):
        Certificates(issued.files)


def test_a_key_of_another_certificate_is_refused(issued: Issued, tmp_path: Path) -> None:
    other = issue(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="key values mismatch"):
        Certificates(TLSFiles(certificate=issued.files.certificate, key=other.files.key, authority="/dev/null"))


def test_nobody_is_asked_for_a_passphrase(issued: Issued) -> None:
    path = Path(issued.files.key)
    key = load_pem_private_key(path.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"secret"))
    path.write_bytes(locked)
    with pytest.raises(ConfigurationError, match="without a passphrase"):
        Certificates(issued.files)


def test_renewed_files_are_used_from_then_on(issued: Issued, looks_each_time: None) -> None:
    certificates = Certificates(issued.files)
    before = certificates.for_server()
    assert certificates.for_server() is before
    issued.renew(trusts="another job")
    after = certificates.for_server()
    assert serial_of(after) != serial_of(before)
    assert certificates.for_client() is certificates.for_client()


def test_files_are_looked_at_once_a_second(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(credentials, "time", SimpleNamespace(monotonic=lambda: now_s))
    certificates = Certificates(issued.files)
    before = certificates.for_client()
    issued.renew()
    assert certificates.for_client() is before
    now_s += 1.0
    assert certificates.for_client() is not before


def test_files_that_are_renewed_one_by_one_are_used_when_they_fit_together(
    issued: Issued, tmp_path: Path, looks_each_time: None, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(issued.files)
    before = certificates.for_client()
    other = issue(tmp_path / "other")
    with caplog.at_level(logging.WARNING, "ft_transport.credentials"):
        Path(other.files.certificate).replace(issued.files.certificate)
        assert [certificates.for_client() for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1
    Path(other.files.key).replace(issued.files.key)
    after = certificates.for_client()
    assert after is not before
    Path(issued.files.key).unlink()
    with caplog.at_level(logging.WARNING, "ft_transport.credentials"):
        assert [certificates.for_client() for _ in range(3)] == [after] * 3
    assert len(caplog.records) == 2


def test_it_is_shown_without_what_the_files_hold(issued: Issued) -> None:
    certificates = Certificates(issued.files)
    assert "PRIVATE" not in repr(certificates)
    assert "PRIVATE" not in repr(issued.files)
