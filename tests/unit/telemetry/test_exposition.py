"""The text that Prometheus reads, as its own parser reads it."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ft_transport.telemetry.exposition import OPENMETRICS, TEXT, Exposition, accepted
from ft_transport.telemetry.metrics import Metrics, MetricValues, Reading

PARSERS = {OPENMETRICS: parse_openmetrics, TEXT: parse_text}


def samples(metrics: Metrics, form: str) -> dict[tuple[str, ...], float]:
    body, content_type = Exposition(metrics).encode(form)
    assert content_type.partition(";")[0] == form.partition(";")[0]
    families = PARSERS[form](body.decode())  # type: ignore[operator]
    return {
        (sample.name.removeprefix("ft_transport_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("form", [OPENMETRICS, TEXT])
def test_each_kind_is_written_as_prometheus_reads_it(form: str) -> None:
    metrics = Metrics()
    sent, loop = MetricValues("server"), MetricValues("loop")
    sent.add("sent_bytes_total", "a", by=2.5)
    for value in (0.05, 0.5, 0.5, 7.0):
        loop.add("step_seconds", by=value)
    for source in (sent.readings, loop.readings, lambda: [Reading("engine_version", -1, ("x",))]):
        metrics.collect(source)

    shown = samples(metrics, form)
    assert shown["sent_bytes_total", "a"] == 2.5
    assert shown["engine_version", "x"] == -1
    buckets = {labels[1]: number for labels, number in shown.items() if labels[0] == "step_seconds_bucket"}
    assert (buckets["0.03"], buckets["0.1"], buckets["0.3"], buckets["1.0"], buckets["10.0"]) == (0, 1, 1, 3, 4)
    assert (buckets["+Inf"], shown["step_seconds_count",], shown["step_seconds_sum",]) == (4, 4, 8.05)
    assert shown["unreadable_sources",] == 0


@pytest.mark.parametrize("form", [OPENMETRICS, TEXT])
def test_what_there_is_no_number_of_yet_is_announced(form: str) -> None:
    metrics = Metrics()
    metrics.collect(MetricValues("server").readings)
    body, _ = Exposition(metrics).encode(form)
    (family,) = (each for each in PARSERS[form](body.decode()) if each.name == "ft_transport_sent_bytes")  # type: ignore[operator]
    assert (family.type, family.samples) == ("counter", [])


@pytest.mark.parametrize("form", [OPENMETRICS, TEXT])
@pytest.mark.parametrize(
    "value",
    ['a"} 1\nft_transport_forged 7', "\\", "a\\\nb", "\ud800", "\u202e", "\r\n\r\n<script>", "x" * 100_000, "", "é"],
)
def test_no_label_breaks_the_text_or_the_other_numbers(form: str, value: str) -> None:
    metrics = Metrics()
    metrics.collect(lambda: [Reading("engine_version", 7, (value,))])
    metrics.collect(lambda: [Reading("engine_version", 8, (value + "!",))])

    shown = samples(metrics, form)

    levels = {labels[1]: number for labels, number in shown.items() if labels[0] == "engine_version"}
    assert 7 in levels.values()
    assert not [name for name, *_ in shown if "forged" in name]
    assert all(len(label) <= 201 and "\n" not in label and "\u202e" not in label for label in levels)


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", TEXT),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1,text/plain", TEXT),
        ("application/openmetrics-text;version=1.0.0abc", TEXT),
        (";;;,,,=;version=1.0.0", TEXT),
    ],
)
def test_the_form_is_the_one_that_is_asked_for(header: str, form: str) -> None:
    assert accepted(header) == form


def test_the_global_registry_of_prometheus_client_is_left_alone() -> None:
    metrics = Metrics()
    metrics.collect(MetricValues("lock").readings)
    Exposition(metrics).encode(TEXT)
    assert b"ft_transport" not in prometheus_client.generate_latest()
