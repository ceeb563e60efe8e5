"""Whether the members of a process group are there, found out before anybody waits for them where no wait can be ended.

The Lighthouse may count a replica that was killed a moment ago: its request for the quorum was still pending, and its
last sign of life is fresh. Setting up a process group with it waits for the whole timeout. So the members meet in the
store first, and whoever is missing there is knocked at, at the address where it serves its state: where nobody listens
any more, the replica is dead.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined] # exported, undeclared

from manager.errors import QuorumError

_KNOCK_AFTER: Final = timedelta(milliseconds=200)
_KNOCK_TIMEOUT_S: Final = 1.0


def meet(
    *,
    store_address: str,
    prefix: str,
    rank: int,
    names: Sequence[str],
    addresses: Sequence[str],
    timeout: timedelta,
) -> None:
    """Return when all members have called this.

    Args:
        store_address: ``host:port`` of the store.
        prefix: Of the keys; never used before.
        rank: Of this replica.
        names: The members, by rank; for messages.
        addresses: Where each serves its state.
        timeout: For everything.

    Raises:
        QuorumError: One of them is dead, the store does not answer, or somebody did not come in time.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    others = [other for other in range(len(names)) if other != rank]
    # One of them may have the store.
    _refuse_dead(others, names, addresses)
    host, _, port = store_address.rpartition(":")
    try:
        store = PrefixStore(
            prefix, TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        )
        store.set(str(rank), names[rank])
        missing = others
        while missing:
            with contextlib.suppress(DistError):
                store.wait([str(other) for other in missing], _KNOCK_AFTER)
                return
            missing = [other for other in missing if not store.check([str(other)])]
            _refuse_dead(missing, names, addresses)
            if missing and time.monotonic() >= deadline_s:
                raise QuorumError(
                    f"expected {[names[other] for other in missing]} to come within {timeout.total_seconds():g} s"
                )
    except DistError as error:
        raise QuorumError(f"expected the store at {store_address} to answer: {error}") from error


def _refuse_dead(others: Sequence[int], names: Sequence[str], addresses: Sequence[str]) -> None:
    for other in others:
        parts = urlsplit(addresses[other])
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), _KNOCK_TIMEOUT_S):
                pass
        except ConnectionRefusedError as error:
            raise QuorumError(f"{names[other]} is dead: nobody listens at {addresses[other]}") from error
        except OSError:
            continue  # out of reach for the moment, or only slow
