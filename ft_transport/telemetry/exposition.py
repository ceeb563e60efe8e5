"""Metrics in the forms that Prometheus reads: its text format, and OpenMetrics for whoever asks for that.

``prometheus_client`` is imported by the first scrape, on the thread that answers it: a process that nobody scrapes
does without it. Of its registries the global one is left alone: two transports of a process have each their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Final

from ft_transport.errors import escape_peer_text
from ft_transport.telemetry.metrics import METRICS, PREFIX, Distribution, Metrics, Reading

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
TEXT: Final = "text/plain; version=0.0.4"

_MAX_LABEL_CHARACTERS: Final = 200


def accepted(header: str) -> str:
    """Which form a request's ``Accept`` asks for: `OPENMETRICS` or `TEXT`. Pure."""
    for each in header.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [part for part in parameters if part.startswith("version=")]
        if kind == OPENMETRICS.partition(";")[0] and versions in ([], ["version=1.0.0"]):
            return OPENMETRICS
    return TEXT


class Exposition:
    """Writes what is counted in a form that Prometheus reads. One thread at a time.

    Args:
        metrics: What is counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry: CollectorRegistry | None = None

    def encode(self, form: str) -> tuple[bytes, str]:
        """All numbers as they are now.

        Args:
            form: `OPENMETRICS` or `TEXT`.

        Returns:
            The text, and its content type.
        """
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - see the module
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(_Collector(self._metrics))
        encode, content_type = choose_encoder(form)
        return encode(self._registry), content_type


class _Collector:
    """What a registry of ``prometheus_client`` asks for families."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        for _, readings in groupby(self._metrics.readings(), key=lambda reading: reading.name):
            yield _family(list(readings))

    def describe(self) -> Iterator[Family]:
        """Nothing is known before it is asked for; without this, registering would ask."""
        return iter(())


def _family(readings: list[Reading]) -> Any:
    from prometheus_client.core import (  # noqa: PLC0415 - see the module
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    metric = METRICS[readings[0].name]
    kinds: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    family = kinds[metric.kind](PREFIX + metric.name, metric.help, labels=metric.label_names.split())
    shown = set()
    for reading in readings:
        labels = tuple(escape_peer_text(each, max_characters=_MAX_LABEL_CHARACTERS) for each in reading.labels)
        if labels in shown:  # cut off after the same beginning; a scrape with both would be refused as a whole
            continue
        shown.add(labels)
        match reading.value:
            case Distribution(bounds=bounds, counts=counts, total=total):
                names = [*(str(float(bound)) for bound in bounds), "+Inf"]
                family.add_metric(labels, buckets=list(zip(names, accumulate(counts), strict=True)), sum_value=total)
            case int() | float() as value:
                family.add_metric(labels, value)
            case None:
                pass
    return family
