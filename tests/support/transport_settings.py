"""Settings of transports for tests: any field of `Limits` by itself, and values that are fixed for users."""

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Annotated, Any

from ft_transport import Limits, TransportSettings


@dataclass(frozen=True, kw_only=True)
class _OpenSettings(TransportSettings):
    chunk_bytes: int = TransportSettings.chunk_bytes
    max_failures: int = TransportSettings.max_failures
    lease: Annotated[timedelta, timedelta(0)] = TransportSettings.lease
    contended_bytes_per_s: float = TransportSettings.contended_bytes_per_s


def settings_of(**chosen: Any) -> TransportSettings:
    limits = Limits(**{each.name: chosen.pop(each.name) for each in fields(Limits) if each.name in chosen})
    return _OpenSettings(limits=limits, **chosen)
