"""What is counted: bounded, exact, and kept by nobody."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from ft_transport.telemetry.metrics import Metrics, weakly
from ft_transport.telemetry.readings import OTHER, Counts, Distribution, Durations, Metric, Reading
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder
from ft_transport.telemetry.watch import Watch

THINGS = Metric(name="ft_transport_things_total", kind="counter", help="Things.", labels=("kind", "cause"))
PLAIN = Metric(name="ft_transport_plain_total", kind="counter", help="Plain.")
LEVEL = Metric(name="ft_transport_level", kind="gauge", help="A level.")
LENGTHS = Metric(name="ft_transport_lengths_seconds", kind="histogram", help="Lengths.", labels=("kind",))


def told(metrics: Metrics) -> dict[tuple[str, ...], object]:
    return {
        (reading.metric.name.removeprefix("ft_transport_"), *reading.labels): reading.value
        for reading in metrics.readings()
        if reading.value is not None
    }


class TestCounts:
    def test_are_shown_from_the_beginning_where_they_are_known(self) -> None:
        assert [each.value for each in Counts(PLAIN).readings()] == [0]
        assert [each.labels for each in Counts(THINGS, known=[("a", "b")]).readings()] == [("a", "b")]

    def test_that_are_not_known_yet_are_announced_without_a_number(self) -> None:
        assert list(Counts(THINGS).readings()) == [Reading(metric=THINGS, value=None)]

    def test_add_up_by_labels(self) -> None:
        counts = Counts(THINGS)
        for _ in range(3):
            counts.add("a", "x")
        counts.add("a", "y", by=0.5)
        assert {each.labels: each.value for each in counts.readings()} == {("a", "x"): 3, ("a", "y"): 0.5}
        assert counts.total() == 3.5

    def test_of_too_many_labels_the_later_ones_go_together(self) -> None:
        counts = Counts(THINGS, max_series=3)
        for number in range(10):
            counts.add("a", f"cause{number}")
        shown = {each.labels: each.value for each in counts.readings()}
        assert shown == {("a", "cause0"): 1, ("a", "cause1"): 1, ("a", "cause2"): 1, ("a", OTHER): 7}


class TestDurations:
    def test_lie_in_the_bucket_whose_bound_they_do_not_exceed(self) -> None:
        durations = Durations(LENGTHS, (0.1, 1.0))
        for value in (0.05, 0.1, 0.5, 7.0):
            durations.observe(value, "read")
        (reading,) = durations.readings()
        assert reading.labels == ("read",)
        assert reading.value == Distribution(bounds=(0.1, 1.0), counts=(2, 1, 1), total=7.65)


class TestMetrics:
    def test_two_sources_of_one_number_are_added_up_and_of_a_level_the_later_one_counts(self) -> None:
        metrics = Metrics()
        for value in (2, 3):
            counts, durations = Counts(PLAIN), Durations(LENGTHS, (1.0,))
            counts.add(by=value)
            durations.observe(value, "read")
            metrics.collect(counts.readings)
            metrics.collect(durations.readings)
            metrics.collect(lambda value=value: [Reading(metric=LEVEL, value=value)])  # type: ignore[misc]
        shown = told(metrics)
        assert (shown["plain_total",], shown["level",]) == (5, 3)
        assert shown["lengths_seconds", "read"] == Distribution(bounds=(1.0,), counts=(0, 2), total=5)

    def test_a_source_that_fails_costs_the_others_nothing_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken() -> Iterator[Reading]:
            yield Reading(metric=LEVEL, value=1)
            raise RuntimeError("not now")

        metrics = Metrics()
        metrics.collect(broken)
        metrics.collect(Counts(PLAIN).readings)
        for _ in range(3):
            assert told(metrics) == {("plain_total",): 0, ("level",): 1, ("unreadable_sources",): 1}
        assert caplog.text.count("could not be read") == 1

    def test_what_is_not_told_any_more_is_gone(self) -> None:
        metrics = Metrics()
        stop = metrics.collect(Counts(PLAIN).readings)
        stop()
        stop()
        assert ("plain_total",) not in told(metrics)

    def test_a_method_does_not_keep_its_object(self) -> None:
        class Owner:
            def readings(self) -> Iterator[Reading]:
                yield Reading(metric=LEVEL, value=7)

        metrics, owner = Metrics(), Owner()
        metrics.collect(weakly(owner.readings))
        assert told(metrics)["level",] == 7
        reference = weakref.ref(owner)
        del owner
        assert reference() is None
        assert ("level",) not in told(metrics)

    def test_counts_of_several_threads_under_one_lock_are_exact_while_somebody_reads(self) -> None:
        metrics, counts, mutex = Metrics(), Counts(THINGS), threading.Lock()
        metrics.collect(counts.readings)
        seen: list[float] = []

        def count() -> None:
            for number in range(2000):
                with mutex:
                    counts.add("a", str(number % 7))

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen.append(sum(value for key, value in told(metrics).items() if key[0] == "things_total"))  # type: ignore[misc]
        assert sum(value for key, value in told(metrics).items() if key[0] == "things_total") == 8000  # type: ignore[misc]
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
        shown = told(watch.metrics)
        assert shown["transfer_bytes_total", "heal", "source"] == 100
        assert shown["transfer_seconds_total", "heal", "source"] == 3.0
        assert shown["retries_total", "heal", "ConnectionError"] == 2
        assert shown["retries_total", "heal", OTHER] == 1
        assert shown["operation_bytes_total", "heal"] == 100
        assert shown["operation_last_step", "heal"] == 7
        (record, _) = watch.recorder.recent()
        assert shown["operation_last_success_timestamp_seconds", "heal"] == record.begun_unix_s + record.length_s
        assert shown["operation_phase_seconds_total", "heal", "transfer"] == record.phases[1].length_s
        for outcome in ("ok", "failed"):
            lengths = shown["operation_seconds", "heal", outcome]
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
