"""What a transport fetches for a replica, noted as it comes."""

from __future__ import annotations

from typing import Any

from ft_transport import HTTPTransport, Received


class Fetches:
    """What a replica has fetched: before its first quorum, and in quorums."""

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self.before: list[Received[Any]] = []
        self.in_quorum: list[Received[Any]] = []
        self.relays: list[str] = []
        fetch = transport.fetch

        def noted(*arguments: Any, **keywords: Any) -> Received[Any]:
            received = fetch(*arguments, **keywords)
            self.relays += keywords.get("relays", ())
            (self.before if "max_bytes_per_s" in keywords else self.in_quorum).append(received)
            return received

        transport.fetch = noted  # type: ignore[method-assign]
