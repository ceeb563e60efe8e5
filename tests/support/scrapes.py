"""What a transport's ``/metrics`` tells, read with Prometheus' own parser."""

from __future__ import annotations

from typing import Any
from urllib.request import urlopen

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ft_transport import HTTPTransport

_PREFIX = "ft_transport_"
_TIMEOUT_S = 20.0


def metrics_url(transport: HTTPTransport[Any]) -> str:
    return transport.metadata().removesuffix("/checkpoint/") + "/metrics"


def families(transport: HTTPTransport[Any]) -> dict[str, Metric]:
    """By name, without the prefix; that of a counter without ``_total``."""
    with urlopen(metrics_url(transport), timeout=_TIMEOUT_S) as answer:
        text = answer.read().decode()
    return {each.name.removeprefix(_PREFIX): each for each in text_string_to_metric_families(text)}


def scraped(transport: HTTPTransport[Any]) -> dict[tuple[str, ...], float]:
    """Each number by its name, without the prefix, and the values of its labels in the order of their names."""
    return {
        (sample.name.removeprefix(_PREFIX), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families(transport).values()
        for sample in family.samples
    }
