"""Asks for quorums in the place of a replica that is dead or has left, so that the other replicas do not wait for it.

The Lighthouse answers at once when all members of the last quorum have asked, and waits for a silent member until its
heartbeats expire (torchft's ``src/lighthouse.rs``, ``quorum_compute``). A request also counts as a heartbeat. So a
member can be removed at no cost to the others only by a request under its id. The keeper (``ft_transport.keeper``)
sends that request when the replica's process has died, marked with `has_left`. The members form their process group
without the marked replica. The keeper repeats the request for each quorum, until

- a restarted process of the replica on this host takes the id over, so that no member ever waits for it;
- the replica's heartbeats have expired between two quorums, because steps take longer: nobody waits for it any more;
- the Lighthouse ends or restarts: a restarted one waits for nobody that it has not heard of;
- too few replicas are left to commit a step: then the Lighthouse must wait for others; or
- ``_LONGEST_S`` has passed. Once, the others then wait until the heartbeats expire.

If the whole host dies, its keepers die too, and the heartbeats decide.

`AbsentReplica` runs in the keeper, the rest in the trainer. The keeper loads only the extension module of torchft,
because the package imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, Final

import msgspec
from msgspec import Struct

from ft_transport.keeper import predecessor as keepers
from ft_transport.keeper.messages import Attend
from ft_transport.keeper.predecessor import Predecessor
from ft_transport.keeper.process import keeper
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from ft_transport.runtime.unix_sockets import shared_address

logger = logging.getLogger(__name__)

_KIND: Final = f"{__name__}:AbsentReplica"
_PURPOSE: Final = "stand_in"
_MARK: Final = "has_left"
_LONGEST_S: Final = 600.0
_LEAST_PENDING_S: Final = 5.0
"""A request waits at least as long as a Lighthouse with torchft's default waits for a silent replica."""
_CONNECTING: Final = timedelta(seconds=1)


class Absence(Struct, frozen=True, kw_only=True):
    """The data with which the keeper asks in a replica's place.

    Attributes:
        lighthouse: Address of the Lighthouse.
        replica_id: The id under which the keeper asks.
        num_groups: No process group that was set up under the id has a number as high as this one.
        min_replicas: The smallest number of replicas that can commit a step.
        heartbeat_timeout_s: The Lighthouse declares a replica dead after so many seconds without a heartbeat.
    """

    lighthouse: str
    replica_id: str
    num_groups: int
    min_replicas: int
    heartbeat_timeout_s: float


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Absence)


def has_left(participant: Any) -> bool:
    """Return whether a participant of a quorum is a replica that is dead or has left.

    The mark needs no signature. Any client that reaches the Lighthouse can replace a replica's request by an invalid
    one, with the same effect: the replica takes no part in that quorum.
    """
    # A keeper reports no address. To read the data of each participant in each step would decode its JSON twice.
    return not participant.address and isinstance(participant.data, dict) and participant.data.get(_MARK) is True


class StandIn:
    """Lets the keeper of this process ask for quorums once this process is dead, or its replica has left.

    Only one thread at a time may call the methods, except `check`, which any thread may call.

    Args:
        absence: The data with which the keeper asks.
        name: Configured name of the replica; empty without one.
        predecessor: The keeper of the replica's dead process; ``None`` without one.
    """

    def __init__(self, absence: Absence, name: str, predecessor: AbsentPredecessor | None) -> None:
        self._address = shared_address(_PURPOSE, absence.lighthouse, name) if name else ""
        self._duty = Attend(absence.replica_id, _KIND, _encoder.encode(absence))
        self._predecessor = predecessor
        self._has_left = True
        self._is_closed = False

    def arrive(self) -> None:
        """End all requests in this replica's place. Call this before each request of the replica itself."""
        if not self._has_left:
            return
        if self._predecessor is not None:
            self._predecessor.duty.end()
            self._predecessor = None
        keeper.end(self._duty.name)
        # Before the first request: from that request on, other replicas wait for this one.
        keeper.attend(self._duty)
        if self._address:
            keeper.listen(self._duty.name, self._address)
        self._has_left = False
        if self._is_closed:
            # A signal handler has closed this object meanwhile.
            self.leave()

    def leave(self) -> None:
        """Let the keeper ask in this replica's place from now on, if this replica has ever asked."""
        if not self._has_left:
            self._has_left = True
            keeper.begin(self._duty.name)

    def check(self) -> None:
        """Replace the keeper of this process if it has died."""
        keeper.check()

    def close(self) -> None:
        """Leave, and close the connection to the keeper of the earlier process."""
        self._is_closed = True
        self.leave()
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None:
            predecessor.duty.close()


@dataclass(frozen=True, slots=True)
class AbsentPredecessor:
    """The keeper that asks in the place of the replica's dead process.

    Attributes:
        duty: The connection to the keeper, which can end its requests.
        absence: The data with which it asks.
    """

    duty: Predecessor
    absence: Absence


def find_predecessor(lighthouse: str, name: str) -> AbsentPredecessor | None:
    """Find the keeper that asks in the place of this replica's dead process, if it ran on this host.

    Args:
        lighthouse: Address of the Lighthouse.
        name: Configured name of the replica; empty without one.
    """
    duty = keepers.find_predecessor(shared_address(_PURPOSE, lighthouse, name)) if name else None
    if duty is None:
        return None
    try:
        return AbsentPredecessor(duty, _decoder.decode(duty.argument))
    except msgspec.MsgspecError:  # It is the keeper of another version.
        duty.close()
        return None


class AbsentReplica:
    """The keeper's duty: asks for quorums in a replica's place.

    Args:
        argument: An `Absence`, in msgpack.
        note_over: Called when this object asks no more.
    """

    def __init__(self, argument: bytes, note_over: Callable[[], object]) -> None:
        self._absence = _decoder.decode(argument)
        self._note_over = note_over
        self._ended = SafeEvent()

    def begin(self) -> None:
        """Begin to ask, on a thread."""
        SafeThread(target=self._run, name="ft-transport-stand-in", daemon=True).start()

    def end(self) -> None:
        """Send no further request. The Lighthouse replaces a request that still waits by the next one for the id."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._ask_until_over()
        finally:
            with contextlib.suppress(OSError):
                self._note_over()

    def _ask_until_over(self) -> None:
        absence, until_s = self._absence, time.monotonic() + _LONGEST_S
        pending_s = max(absence.heartbeat_timeout_s, _LEAST_PENDING_S)
        try:
            client = _client_type()(absence.lighthouse, _CONNECTING)
            while not self._ended.is_set() and (left_s := until_s - time.monotonic()) > 0:
                quorum = client.quorum(
                    replica_id=absence.replica_id,
                    timeout=timedelta(seconds=min(pending_s, left_s)),
                    data={_MARK: True},
                )
                if sum(not has_left(each) for each in quorum.participants) < absence.min_replicas:
                    return
        except Exception as error:
            # A timeout: the heartbeats have expired. Any other error: the Lighthouse ends or restarts. A restarted one
            # waits for nobody that it has not heard of, so it must not hear of this replica.
            logger.debug("replica %s: asks no more: %s", absence.replica_id, error)


def _client_type() -> Any:
    """Return torchft's client of the Lighthouse, without the import of torch and the rest of torchft."""
    package = find_spec("torchft")
    # `find_spec` of the extension module would import the package.
    spec = PathFinder.find_spec("torchft._torchft", package.submodule_search_locations) if package is not None else None
    if spec is None or spec.loader is None:
        raise ImportError("expected torchft with its extension module, to ask the Lighthouse")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LighthouseClient
