"""Which version of the package runs here, for who scrapes its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from ft_transport.telemetry.readings import PREFIX, Metric, Reading

_INFO: Final = Metric(
    name=f"{PREFIX}build_info",
    kind="gauge",
    help="1; the labels say which version this is, and how the replica is called in the transport's settings.",
    labels=("version", "replica"),
)


def build_readings(replica: str) -> Iterator[Reading]:
    """See ``telemetry.readings.Source``.

    Args:
        replica: How the replica calls itself.
    """
    yield Reading(metric=_INFO, labels=(_own_version(), replica), value=1)


@cache
def _own_version() -> str:
    """Found out when somebody asks: it is read from a file, which a source tree on the path has not."""
    try:
        return version("ft-transport")
    except PackageNotFoundError:
        return ""
