"""A rendezvous in a store: members find out that all are there before they wait where no wait can be ended.

The Lighthouse may count a replica that was killed a moment ago: its request for the quorum was still pending, and its
last heartbeat is fresh. Configuring a process group with it waits for the whole timeout. So the members announce
themselves in the store first, and each probes the address at which a missing member serves its state. Where no process
listens any more, the replica is dead. A member that gives up before it comes says so (`decline`), which ends the wait.
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
    """Returns when all members have called this.

    Args:
        store: Holds the keys of the members.
        prefix: Of the keys; never used before.
        rank: Of this member.
        names: The members, by rank; for messages.
        addresses: Where each serves its state.
        timeout: For everything.

    Raises:
        RankGoneError: One of them is dead or has given up, or the store does not answer.
        DeadlineExceededError: One of them did not come in time, or the store did not answer in time.
    """
    deadline = Deadline.after(timeout)
    keys = {other: f"{prefix}/{other}" for other in range(len(names)) if other != rank}
    missing = list(keys)
    # One of them may have the store.
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
    """Ends the rendezvous of the other members: this one does not come.

    Args:
        store: See `rendezvous`, as for what follows.
        prefix: See above.
        name: Of this member.
        reason: Why it does not come.
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
    """Whether the host says that nobody listens there. One that says nothing may be slow, or out of reach.

    Args:
        address: Whatever a peer calls one.
        timeout_s: For all of it, the look-up of the name too, in seconds.
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
