"""What is counted: bounded, exact, and kept by nobody."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ft_transport.telemetry.metrics import (
    METRICS,
    OPENMETRICS,
    OTHER,
    TEXT,
    Distribution,
    Metrics,
    MetricValues,
    Reading,
    accepted,
    encode_metrics,
    weakly,
)
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder


def told(metrics: Metrics) -> dict[tuple[str, ...], object]:
    return {
        (reading.name, *reading.labels): reading.value for reading in metrics.readings() if reading.value is not None
    }


def shown(values: MetricValues, name: str) -> dict[tuple[str, ...], object]:
    return {reading.labels: reading.value for reading in values.readings() if reading.name == name}


class TestTable:
    def test_every_row_is_one_that_prometheus_takes(self) -> None:
        for metric in METRICS.values():
            assert metric.help.endswith(".")
            assert bool(metric.bounds) == (metric.kind == "histogram")
            assert list(metric.bounds) == sorted(metric.bounds)
            assert not metric.known or len(metric.label_names.split()) == 1


class TestMetricValues:
    def test_are_shown_from_the_beginning_where_they_are_known(self) -> None:
        assert shown(MetricValues("loop"), "steps_committed_total") == {(): 0}
        assert shown(MetricValues("lock"), "lock_timeouts_total") == {("read",): 0, ("write",): 0}
        values = MetricValues("loop")
        for number in (3, 2):
            values.set("participants", to=number)
        assert shown(values, "participants") == {(): 2}, "of a gauge the last one counts"

    def test_of_too_many_labels_the_later_ones_go_together(self) -> None:
        values = MetricValues("records")
        for number in range(70):
            values.add("retries_total", "a", f"cause{number}")
        values.add("retries_total", "a", "cause1", by=0.5)
        found = shown(values, "retries_total")
        assert found == {**{("a", f"cause{number}"): 1 + (number == 1) / 2 for number in range(64)}, ("a", OTHER): 6}

    def test_lie_in_the_bucket_whose_bound_they_do_not_exceed(self) -> None:
        values = MetricValues("records")
        for value in (0.05, 0.1, 0.5, 7000.0):
            values.add("operation_seconds", "save", "ok", by=value)
        ((labels, value),) = shown(values, "operation_seconds").items()
        assert labels == ("save", "ok")
        bounds = METRICS["operation_seconds"].bounds
        assert value == Distribution(bounds=bounds, counts=(2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1), total=7000.65)


class TestMetrics:
    def test_two_sources_of_one_number_are_added_up_and_of_a_level_the_later_one_counts(self) -> None:
        metrics = Metrics()
        for value in (2, 3):
            values = MetricValues("lock")
            values.add("lock_timeouts_total", "read", by=value)
            values.add("lock_wait_seconds", "read", by=value)
            metrics.collect(values.readings)
            metrics.collect(lambda value=value: [Reading("step", value)])  # type: ignore[misc]
        found = told(metrics)
        assert (found["lock_timeouts_total", "read"], found["step",]) == (5, 3)
        waits = found["lock_wait_seconds", "read"]
        assert isinstance(waits, Distribution)
        assert (sum(waits.counts), waits.total) == (2, 5)

    def test_a_source_that_fails_costs_the_others_nothing_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken() -> Iterator[Reading]:
            yield Reading("step", 1)
            raise RuntimeError("not now")

        metrics = Metrics()
        metrics.collect(broken)
        metrics.collect(MetricValues("peers").readings)
        for _ in range(3):
            assert told(metrics) == {("recoveries_total",): 0, ("step",): 1, ("unreadable_sources",): 1}
        assert caplog.text.count("cannot read the metrics") == 1

    def test_a_method_does_not_keep_its_object(self) -> None:
        class Owner:
            def readings(self) -> Iterator[Reading]:
                yield Reading("step", 7)

        metrics, owner = Metrics(), Owner()
        stop = metrics.collect(MetricValues("peers").readings)
        stop()
        stop()
        metrics.collect(weakly(owner.readings))
        assert told(metrics)["step",] == 7
        assert ("recoveries_total",) not in told(metrics), "it was stopped"
        reference = weakref.ref(owner)
        del owner
        assert reference() is None
        assert ("step",) not in told(metrics)

    def test_counts_of_several_threads_are_exact_while_a_scrape_reads(self) -> None:
        metrics, values = Metrics(), MetricValues("server", threading.RLock())
        metrics.collect(values.readings)
        seen: list[float] = []

        def count() -> None:
            for number in range(2000):
                values.add("sent_bytes_total", str(number % 7))

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen.append(sum(value for key, value in told(metrics).items() if key[0] == "sent_bytes_total"))  # type: ignore[misc]
        assert sum(value for key, value in told(metrics).items() if key[0] == "sent_bytes_total") == 8000  # type: ignore[misc]
        assert seen == sorted(seen)


class TestRecords:
    def test_are_added_up(self) -> None:
        watch = ProcessStatus(Recorder())
        with watch.recorder.begin("heal", phase="quorum") as recording:
            recording.phase("transfer")
            recording.describe(step=7, num_bytes=100)
            recording.transfer(Transfer(peer="a:1", role="source", num_bytes=60, length_s=1.0))
            recording.transfer(Transfer(peer="b:1", role="source", num_bytes=40, length_s=2.0))
            recording.retry(ConnectionError("a:1 is\ngone"), peer="a:1")
            recording.retry("ConnectionError: again")
            recording.retry("the first step was not committed: x")
        watch.recorder.begin("heal", phase="quorum").end("failed", error="no")
        found = told(watch.metrics)
        assert found["transfer_bytes_total", "heal", "source"] == 100
        assert found["transfer_seconds_total", "heal", "source"] == 3.0
        assert found["retries_total", "heal", "ConnectionError"] == 2
        assert found["retries_total", "heal", OTHER] == 1
        assert found["operation_bytes_total", "heal"] == 100
        assert found["operation_last_step", "heal"] == 7
        (record, _) = watch.recorder.recent()
        assert found["operation_last_success_timestamp_seconds", "heal"] == record.begun_unix_s + record.length_s
        assert found["operation_phase_seconds_total", "heal", "transfer"] == record.phases[1].length_s
        for outcome in ("ok", "failed"):
            lengths = found["operation_seconds", "heal", outcome]
            assert isinstance(lengths, Distribution)
            assert sum(lengths.counts) == 1

    def test_what_peers_say_becomes_no_label(self) -> None:
        watch = ProcessStatus(Recorder())
        with watch.recorder.begin("fetch") as recording:
            for number in range(300):
                recording.retry(f'x"{number}\n: refused')
                recording.retry(f"Made{number}: up")
                recording.retry("A" * 1000)
        causes = [key for key in told(watch.metrics) if key[0] == "retries_total"]
        assert len(causes) <= 65
        assert max(len(cause[2]) for cause in causes) < 65

    def test_of_a_recorder_that_two_follow_count_once_for_each_and_it_keeps_neither(self) -> None:
        recorder = Recorder()
        first = ProcessStatus(recorder)
        first.metrics.follow(recorder)
        other = ProcessStatus(Recorder())
        other.metrics.follow(recorder)
        with recorder.begin("save") as recording:
            recording.retry("A: b")
        for watch in (first, other):
            assert told(watch.metrics)["retries_total", "save", "A"] == 1
        reference = weakref.ref(other.metrics)
        gc.disable()
        try:
            del watch, other
            assert reference() is None
        finally:
            gc.enable()
        assert len(recorder._listeners) == 1


PARSERS = {OPENMETRICS: parse_openmetrics, TEXT: parse_text}


def samples(metrics: Metrics, form: str) -> dict[tuple[str, ...], float]:
    body, content_type = encode_metrics(metrics, form)
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
    body, _ = encode_metrics(metrics, form)
    (family,) = (each for each in PARSERS[form](body.decode()) if each.name == "ft_transport_sent_bytes")  # type: ignore[operator]
    assert (family.type, family.samples) == ("counter", [])


@pytest.mark.parametrize("form", [OPENMETRICS, TEXT])
def test_no_label_breaks_the_text_or_the_other_numbers(form: str) -> None:
    for value in (
        *('a"} 1\nft_transport_forged 7', "\\", "a\\\nb", "\ud800", "\u202e", "\r\n\r\n<script>"),
        *("x" * 100_000, "", "é"),
    ):
        metrics = Metrics()
        metrics.collect(lambda value=value: [Reading("engine_version", 7, (value,))])  # type: ignore[misc]
        metrics.collect(lambda value=value: [Reading("engine_version", 8, (value + "!",))])  # type: ignore[misc]

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
