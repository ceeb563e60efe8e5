from __future__ import annotations

import pytest

from ft_transport.publish.engine_lag import EngineLag
from ft_transport.publish.report import EngineState


def engine(url: str, version: int | None) -> EngineState:
    return EngineState(url=url, version=version, is_counted=True, outcome="confirmed")


def told(lag: EngineLag) -> dict[tuple[str, ...], object]:
    return {(reading.name, *reading.labels): reading.value for reading in lag.readings() if reading.value is not None}


def test_an_engine_lags_from_when_the_first_version_that_it_lacks_was_published() -> None:
    now_s = 100.0
    states = [engine("http://new", 5), engine("http://old", 2), engine("http://none", None)]
    lag = EngineLag(lambda: states, clock=lambda: now_s)
    for version, now_s in ((2, 110.0), (4, 120.0), (5, 150.0)):  # noqa: B007 - the clock reads it
        lag.published(version)
    now_s = 160.0

    shown = told(lag)

    assert shown["published_version",] == 5
    assert shown["engines",] == 3
    for url, version, num_missing, missing_s in (
        ("http://new", 5, 0, 0.0),
        ("http://old", 2, 2, 40.0),
        ("http://none", -1, 3, 50.0),
    ):
        found = [shown[name, url] for name in ("engine_version", "engine_lag_versions", "engine_lag_seconds")]
        assert found == [version, num_missing, missing_s]


def test_of_many_engines_a_hundred_are_told_apart() -> None:
    lag = EngineLag(lambda: [engine(f"http://host-{number}", 1) for number in range(1000)])

    shown = told(lag)

    assert shown["engines",] == 1000
    assert len([key for key in shown if key[0] == "engine_version"]) == 100


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@host:80/v1", "http://host:80/v1"),
        ("https://a@b:secret@host", "https://host"),
        ("http://host:80/v1?to=a@b", "http://host:80/v1?to=a@b"),
        ("http://[broken", "http://[broken"),
        ("", ""),
    ],
)
def test_a_password_in_a_url_is_not_told(url: str, shown: str) -> None:
    assert [key[1] for key in told(EngineLag(lambda: [engine(url, 1)])) if key[0] == "engine_version"] == [shown]
