"""Metrics in the forms that Prometheus reads: its text format, and OpenMetrics for clients that request it.

The first scrape imports ``prometheus_client``, on the thread that answers it: a process without scrapes does not need
it. The global registry stays unused: each transport of a process has its own.
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
    """Return the form that a request's ``Accept`` asks for: `OPENMETRICS` or `TEXT`. Pure."""
    for each in header.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [part for part in parameters if part.startswith("version=")]
        if kind == OPENMETRICS.partition(";")[0] and versions in ([], ["version=1.0.0"]):
            return OPENMETRICS
    return TEXT


class Exposition:
    """Encodes metrics in a form that Prometheus reads. One thread at a time.

    Args:
        metrics: The metrics.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry: CollectorRegistry | None = None

    def encode(self, form: str) -> tuple[bytes, str]:
        """Encode all present values.

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
    """Yields the families to a registry of ``prometheus_client``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        for _, readings in groupby(self._metrics.readings(), key=lambda reading: reading.name):
            yield _family(list(readings))

    def describe(self) -> Iterator[Family]:
        """Yield nothing: no family is known before a scrape; without this method, registering would collect."""
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
