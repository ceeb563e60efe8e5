"""What a fetch from peers with the same state is told: who they are, and how it is received."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ft_transport.errors import ConfigurationError
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress, peer_addresses
from ft_transport.state.matching import Incoming
from ft_transport.transfer.known import Known
from ft_transport.wire.routes import StepSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPeers:
    """Who has a state, and who receives it now.

    Attributes:
        sources: The peers that have it.
        receivers: Who receives it now, this one too, in an order that is the same for all; empty where nobody else.
        own: Which of these this one is.
    """

    sources: Sequence[PeerAddress]
    receivers: Sequence[PeerAddress] = ()
    own: int = 0

    @classmethod
    def of(cls, sources: str | Sequence[str], *, relays: Sequence[str], own: str) -> FetchPeers:
        """From URLs, as ``HTTPTransport.fetch`` takes them.

        Args:
            sources: Of one peer, or of several.
            relays: Of all receivers, in any order.
            own: Of this one, which need not be among them.

        Raises:
            ConfigurationError: One of them is none.
        """
        having = [PeerAddress.from_url(sources)] if isinstance(sources, str) else peer_addresses(sources)
        if isinstance(relays, str) or not isinstance(relays, Collection):
            raise ConfigurationError(f"expected a sequence of addresses as relays, got {relays!r}")
        this = PeerAddress.from_url(own)
        others = {PeerAddress.from_url(each) for each in relays} - {this}
        if not others:
            return cls(sources=having)
        receivers = sorted({*others, this}, key=str)
        return cls(sources=having, receivers=receivers, own=receivers.index(this))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """What to receive from peers with the same state, and how; ``HTTPTransport.fetch`` says what each means.

    Attributes:
        peers: Who has it, and who receives it now.
        step: A step, or ``latest``.
        settings: Connections, deadlines and the like.
        into: The receiver's own state.
        check: Called with what will come, before any of it does.
        verify_late: Whether digests that come after the data are compared.
        known: What need not be fetched.
    """

    peers: FetchPeers
    step: StepSelector
    settings: FetchSettings
    into: object
    check: Callable[[Incoming], None] | None
    verify_late: bool
    known: Known = None
