"""A rendezvous in a store: members make sure that all are present before a wait that cannot be interrupted.

The Lighthouse may count a replica that was killed a moment ago: its request for the quorum was still pending, and its
last heartbeat is fresh. Configuring a process group with it waits for the whole timeout. So the members announce
themselves in the store first, and each probes the address at which a missing member serves its state. If no process
listens there any more, the replica is dead. A member that gives up before it arrives says so (`decline`), which ends
the wait.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from ft_transport.coordination.store_channel import AT_ONCE, StoreChannel
from ft_transport.errors import DeadlineExceededError, RankGoneError, TransportError
from ft_transport.http.peer_address import AddressInfo, PeerAddress, look_up
from ft_transport.runtime.deadline import Deadline

_PROBE_AFTER: Final = timedelta(milliseconds=200)
_PROBE_TIMEOUT: Final = timedelta(seconds=1)


def rendezvous(
    *,
    store: StoreChannel,
    prefix: str,
    rank: int,
    names: Sequence[str],
    addresses: Sequence[str],
    timeout: timedelta,
) -> None:
    """Wait until all members have called this.

    Args:
        store: Holds the keys of the members.
        prefix: Prefix of the keys; never used before.
        rank: This member's rank.
        names: The members, by rank; for messages.
        addresses: Where each serves its state.
        timeout: For the whole call.

    Raises:
        RankGoneError: A member is dead or has given up, or the store does not answer.
        DeadlineExceededError: A member did not arrive in time, or the store did not answer in time.
    """
    deadline = Deadline.after(timeout)
    keys = {other: f"{prefix}/{other}" for other in range(len(names)) if other != rank}
    missing = list(keys)
    # A missing member may host the store.
    _refuse_dead(missing, names, addresses, deadline)
    store.set(f"{prefix}/{rank}", names[rank], deadline.cap(timeout))
    given_up = _given_up_key(prefix)
    while missing and not store.get(
        [keys[other] for other in missing],
        deadline.cap(_PROBE_AFTER),
        unless=[given_up],
        answer_timeout=max(_PROBE_AFTER, deadline.cap(timeout)),
    ):
        reason = store.get([given_up], AT_ONCE, answer_timeout=deadline.cap(timeout))
        if reason is not None:
            raise RankGoneError(reason[0].decode(errors="replace"))
        unset = store.missing([keys[other] for other in missing], deadline.cap(timeout))
        missing = [other for other in missing if keys[other] in unset]
        _refuse_dead(missing, names, addresses, deadline)
        if missing and deadline.is_over():
            raise DeadlineExceededError(
                f"expected {[names[other] for other in missing]} to come within {timeout.total_seconds():g} s"
            )


def decline(*, store: StoreChannel, prefix: str, name: str, reason: str, timeout: timedelta) -> None:
    """End the rendezvous of the other members, because this member will not arrive.

    Args:
        store: See `rendezvous`.
        prefix: See `rendezvous`.
        name: This member's name.
        reason: Why it does not arrive.
        timeout: For the store to answer.

    Raises:
        RankGoneError: The store does not answer.
        DeadlineExceededError: The store did not answer in time.
    """
    store.set(_given_up_key(prefix), f"{name} has given up before the members met: {reason}", timeout)


def _given_up_key(prefix: str) -> str:
    return f"{prefix}/given up"


def _refuse_dead(others: Sequence[int], names: Sequence[str], addresses: Sequence[str], deadline: Deadline) -> None:
    for other in others:
        if deadline.is_over():
            return
        if nobody_listens(addresses[other], deadline.cap(_PROBE_TIMEOUT).total_seconds()):
            raise RankGoneError(f"{names[other]} is dead: nobody listens at {addresses[other]}", ranks=(other,))


def nobody_listens(address: str, timeout_s: float) -> bool:
    """Return whether the host refuses connections at an address.

    A host that does not answer does not count: it may be slow or unreachable.

    Args:
        address: An address as a peer sent it, not validated.
        timeout_s: Limit of the whole probe, with the look-up of the name, in seconds.
    """
    give_up_s = time.monotonic() + timeout_s
    try:
        found = look_up(PeerAddress.from_url(address), timeout_s=timeout_s, is_given_up=_never)
    except (TransportError, OSError):
        return False
    return bool(found) and all(_is_refused(each, give_up_s) for each in found)


def _is_refused(found: AddressInfo, give_up_s: float) -> bool:
    family, kind, protocol, _, address = found
    remaining_s = give_up_s - time.monotonic()
    if remaining_s <= 0:
        return False
    try:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(remaining_s)
            connection.connect(address)
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _never() -> bool:
    return False
