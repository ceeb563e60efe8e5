"""A setting that cannot work is refused where it is made, by its name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from transport_settings import settings_of

from ft_transport import ConfigurationError, FetchTimeout, HTTPTransport, Limits, TransportSettings
from ft_transport import settings as module
from ft_transport.credentials import TOKEN_VARIABLE

ZERO = timedelta(0)
NEGATIVE = timedelta(seconds=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_snapshots", 0),
        ("max_clients", 0),
        ("max_clients", 1.5),
        ("max_send_bytes_per_s", 0),
        ("max_send_bytes_per_s", "1"),
        ("stall_timeout", NEGATIVE),
        ("stall_timeout", ZERO),
        ("min_bytes_per_s", 0),
        ("min_bytes_per_s", -1.0),
        ("min_bytes_per_s", float("nan")),
        ("port", -1),
        ("port", 65536),
        ("max_snapshots", "2"),
        ("max_snapshots", True),
        ("max_snapshots", torch.tensor(2.5)),
        ("max_snapshots", np.array([2, 3])),
        ("port", None),
        ("stall_timeout", 5.0),
        ("stall_timeout", 5),
        ("min_bytes_per_s", "fast"),
        ("host", 127),
        ("advertise", b"eth0"),
        ("replica", None),
        ("verify", "no"),
        ("on_progress", "print"),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        settings_of(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_chunks": -1}, "num_chunks"),
        ({"num_chunks": 2.0}, "num_chunks"),
        ({"timeout": NEGATIVE}, "timeout"),
        ({"timeout": 5.0}, r"datetime\.timedelta as timeout, got float 5\.0"),
        ({"settings": {}}, "expected TransportSettings as settings, got dict"),
        ({"state_dict": {}}, "expected a function as state_dict, got dict"),
        ({"read_lock": 1}, "expected a function as read_lock, got int"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        HTTPTransport(**arguments)


def test_an_argument_of_a_call_out_of_range_is_named_before_anything_is_copied() -> None:
    transport: HTTPTransport[Any] = HTTPTransport(settings=TransportSettings(host="127.0.0.1"))
    url, timeout = transport.metadata(), timedelta(seconds=5)
    arguments: list[tuple[Any, str]] = [
        ({"max_bytes_per_s": 0}, "a positive number as max_bytes_per_s, got int 0"),
        ({"max_bytes_per_s": float("nan")}, "a positive number as max_bytes_per_s"),
        ({"max_bytes_per_s": "5"}, "a positive number as max_bytes_per_s, got str '5'"),
        ({"timeout": 3}, r"datetime\.timedelta as timeout, got int 3"),
        ({"relays": None}, "addresses as relays, got None"),
        ({"check": 5}, "a function as check, got int 5"),
        ({"metadata": None}, "URL of a peer, got None"),
        *(({"step": step}, "step") for step in ("1", -1, None, 1.0, True)),
    ]
    try:
        for given, name in arguments:
            with pytest.raises(ConfigurationError, match=name):
                transport.fetch(**{"metadata": url, "step": 1, **given})
        for step in ("1", -1, None, 1.0, True):
            with pytest.raises(ConfigurationError, match="step"):
                transport.send_checkpoint([], step, {"a": 1}, timeout)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="timedelta as timeout"):
            transport.send_checkpoint([], 1, {"a": 1}, 5)  # type: ignore[arg-type]
    finally:
        transport.shutdown()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"progress": 3}, r"datetime\.timedelta as progress timeout, got int 3"),
        ({"progress": NEGATIVE}, "progress timeout that is not negative"),
        ({"unreachable": 3}, r"datetime\.timedelta as unreachable timeout"),
    ],
)
def test_a_timeout_of_a_fetch_out_of_range_is_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        FetchTimeout(total=timedelta(seconds=1), **arguments)


@pytest.mark.parametrize("token", ["", "three words here", "ü"])
def test_a_token_that_cannot_be_sent_is_refused_without_leaving_anything(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    with pytest.raises(ConfigurationError, match="token"):
        HTTPTransport(settings=TransportSettings(host="127.0.0.1", token=token))
    if token:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(ConfigurationError, match="token"):
            HTTPTransport(settings=TransportSettings(host="127.0.0.1"))


def test_a_token_of_another_type_is_refused_unseen() -> None:
    with pytest.raises(ConfigurationError, match=r"str or None as token, got bytes$"):
        TransportSettings(token=b"secret")  # type: ignore[arg-type]


def test_the_limits_themselves_are_allowed() -> None:
    assert settings_of(max_snapshots=1, max_clients=1, port=65535).limits.max_snapshots == 1


def test_what_numpy_and_torch_count_with_becomes_an_int() -> None:
    limits = Limits(max_clients=torch.tensor(1 << 20), max_snapshots=np.uint8(3))  # type: ignore[arg-type]
    assert (type(limits.max_clients), limits.max_clients) == (int, 1 << 20)
    assert (type(limits.max_snapshots), limits.max_snapshots) == (int, 3)


def test_limits_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected Limits as limits, got dict"):
        TransportSettings(limits={"max_snapshots": 1})  # type: ignore[arg-type]


def test_settings_cannot_be_changed_later() -> None:
    settings = TransportSettings()
    with pytest.raises(AttributeError):
        settings.port = 1  # type: ignore[misc]


def test_the_smallest_settings_carry_a_state() -> None:
    timeout = timedelta(seconds=30)
    settings = settings_of(host="127.0.0.1", max_snapshots=1, chunk_bytes=1, max_failures=1, lease=ZERO)
    transport: HTTPTransport[Any] = HTTPTransport(timeout, num_chunks=1, settings=settings)
    try:
        transport.send_checkpoint([], 1, {"b": bytes(range(100)), "n": None}, timeout)
        assert transport.fetch(transport.metadata(), 1).state == {"b": bytes(range(100)), "n": None}
    finally:
        transport.shutdown()


def test_by_default_there_is_a_thread_per_core_up_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (4, 4), (64, 8), (None, 1)):
        monkeypatch.setattr(module.os, "cpu_count", lambda cores=cores: cores)
        assert module.default_num_threads() == expected
