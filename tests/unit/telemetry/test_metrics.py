"""What is counted: bounded, exact, and kept by nobody."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from ft_transport.telemetry.metrics import METRICS, OTHER, Distribution, Metrics, MetricValues, Reading, weakly
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder
from ft_transport.telemetry.watch import Watch


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

    def test_that_are_not_known_yet_are_announced_without_a_number(self) -> None:
        assert list(MetricValues("server").readings()) == [Reading("sent_bytes_total", None)]

    def test_add_up_by_labels(self) -> None:
        values = MetricValues("records")
        for _ in range(3):
            values.add("retries_total", "a", "x")
        values.add("retries_total", "a", "y", by=0.5)
        assert shown(values, "retries_total") == {("a", "x"): 3, ("a", "y"): 0.5}

    def test_of_too_many_labels_the_later_ones_go_together(self) -> None:
        values = MetricValues("records")
        for number in range(70):
            values.add("retries_total", "a", f"cause{number}")
        found = shown(values, "retries_total")
        assert found == {**{("a", f"cause{number}"): 1 for number in range(64)}, ("a", OTHER): 6}

    def test_lie_in_the_bucket_whose_bound_they_do_not_exceed(self) -> None:
        values = MetricValues("records")
        for value in (0.05, 0.1, 0.5, 7000.0):
            values.add("operation_seconds", "save", "ok", by=value)
        ((labels, value),) = shown(values, "operation_seconds").items()
        assert labels == ("save", "ok")
        bounds = METRICS["operation_seconds"].bounds
        assert value == Distribution(bounds=bounds, counts=(2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1), total=7000.65)

    def test_of_a_gauge_the_last_one_counts(self) -> None:
        values = MetricValues("loop")
        for number in (3, 2):
            values.set("participants", to=number)
        assert shown(values, "participants") == {(): 2}


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
        assert caplog.text.count("could not be read") == 1

    def test_what_is_not_told_any_more_is_gone(self) -> None:
        metrics = Metrics()
        stop = metrics.collect(MetricValues("peers").readings)
        stop()
        stop()
        assert ("recoveries_total",) not in told(metrics)

    def test_a_method_does_not_keep_its_object(self) -> None:
        class Owner:
            def readings(self) -> Iterator[Reading]:
                yield Reading("step", 7)

        metrics, owner = Metrics(), Owner()
        metrics.collect(weakly(owner.readings))
        assert told(metrics)["step",] == 7
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
        watch = Watch(Recorder())
        with watch.recorder.begin("heal", phase="quorum") as recording:
            recording.phase("transfer")
            recording.tell(step=7, num_bytes=100)
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
        watch = Watch(Recorder())
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
        first = Watch(recorder)
        first.metrics.follow(recorder)
        other = Watch(Recorder())
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
