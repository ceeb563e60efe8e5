"""Hosts, links and a clock that are not there, around the machines that decide in a real fetch.

Each receiver has a `FetchMachine` with `SwarmWork`; what it asks for takes as long as links of given rates need, shared
max-min fairly by all that goes over them at one time. Nothing is random unless its caller is.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ft_transport.errors import PeerNotReadyError, PeerUnreachableError, TransportError
from ft_transport.wire.fetch import FetchMachine, Interrupt, Request, Stop, WorkerIndex
from ft_transport.wire.swarm import Swarm
from ft_transport.wire.swarm_work import SwarmWork

_TICK_S: Final = 0.25
_NEVER: Final = float("inf")
_NEARLY: Final = 1.02
"""Links whose shares differ by less are taken for equally full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host.

    Attributes:
        rate: Bytes per second of its link, each way.
        start_s: When it begins to receive.
        death_s: When it is gone, and all that it sends ends.
        missing: Chunks that it lacks, half-open ranges in order; all by default.
    """

    rate: float
    start_s: float = 0.0
    death_s: float = _NEVER
    missing: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFetch:
    """A fetch of one state by all receivers.

    Attributes:
        sources: Those that have it.
        receivers: Those that want it.
        num_chunks: How many chunks it has, all of one size.
        chunk_bytes: The size.
        num_connections: The setting of all receivers.
        request_s: What a request costs before its answer begins.
        connection_s: What the first one over a connection costs more.
        relay_wait_s: How long a relay holds a request for what it has not.
        relay_pause_s: How long it pauses within an answer for the next chunk.
        num_sources_each: How many of the sources a receiver is told of; all by default.
        longest_s: A fetch that takes longer hangs.
        resolution: The part of a chunk's time at a whole link for which rates stay as they are.
    """

    sources: Sequence[Host]
    receivers: Sequence[Host]
    num_chunks: int
    chunk_bytes: int = 4 << 20
    num_connections: int = 4
    request_s: float = 0.002
    connection_s: float = 0.002
    relay_wait_s: float = 1.0
    relay_pause_s: float = 1.0
    num_sources_each: int | None = None
    longest_s: float = 1e6
    resolution: float = 0.02

    @property
    def total_bytes(self) -> int:
        """All that a receiver wants."""
        return self.num_chunks * self.chunk_bytes

    def run(self) -> Outcome:
        """Goes through it until all who live have stopped."""
        return _Simulation(self).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        end_s: When each receiver stopped, by its number; those that died have none.
        errors: Why one could not finish, by its number.
        from_sources_bytes: What left each source.
        relayed_bytes: What left each receiver.
        num_requests: How many requests were made by all.
    """

    end_s: dict[int, float]
    errors: dict[int, TransportError]
    from_sources_bytes: Sequence[int]
    relayed_bytes: Sequence[int]
    num_requests: int

    @property
    def last_s(self) -> float:
        """When the last one was done."""
        return max(self.end_s.values())


@dataclass(slots=True, eq=False)
class _Receiver:
    number: int
    host: Host
    fleet: Swarm
    own_sources: Sequence[int]
    work: SwarmWork
    machine: FetchMachine[int]
    num_workers: int
    landed: bytearray
    num_landed: int = 0
    furthest: int = 0
    idle: list[int] = field(default_factory=list)
    exchanges: dict[int, _Exchange] = field(default_factory=dict)
    followers: dict[int, _Exchange] = field(default_factory=dict)
    connected: set[tuple[int, int]] = field(default_factory=set)
    is_dead: bool = False


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request of one worker; a relay answers with chunks as they land, of those that are there the first one."""

    receiver: _Receiver
    worker: int
    request: Request[int]
    relay: _Receiver | None
    server: int
    wanted: dict[int, int]
    ready: list[int]
    sending: int | None = None
    num_sent: int = 0
    is_over: bool = False


class _Simulation:
    def __init__(self, fetch: SimulatedFetch) -> None:
        self._fetch = fetch
        self._now_s = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        num_sources, num_receivers = len(fetch.sources), len(fetch.receivers)
        num_each = min(fetch.num_sources_each or num_sources, num_sources)
        self._receivers = []
        for number, host in enumerate(fetch.receivers):
            own_sources = [(number * num_each + index) % num_sources for index in range(num_each)]
            fleet = Swarm(num_sources=num_each, num_receivers=num_receivers, own=number)
            names = [f"host {index}" for index in range(num_each + num_receivers - 1)]
            missing = host.missing if host.missing is not None else [(0, fetch.num_chunks)]
            work = SwarmWork(missing, num_chunks=fetch.num_chunks, swarm=fleet, num_connections=fetch.num_connections)
            machine: FetchMachine[int] = FetchMachine(work, sources=names, max_failures=4)
            landed = bytearray(b"\x01" * fetch.num_chunks)
            for first, end in missing:
                landed[first:end] = bytes(end - first)
            self._receivers.append(_Receiver(number, host, fleet, own_sources, work, machine, work.num_workers, landed))
        hosts = [*fetch.sources, *fetch.receivers]
        num_slots = sum(each.num_workers for each in self._receivers)
        self._links = _Links(np.array([host.rate for host in hosts]), num_slots)
        self._resolution_s = fetch.resolution * fetch.chunk_bytes / max(host.rate for host in hosts)
        self._by_slot: list[_Exchange | None] = [None] * num_slots
        self._num_sent = [0] * len(hosts)
        self._is_dead = [False] * len(hosts)
        self._num_requests = 0
        self._end_s: dict[int, float] = {}
        for receiver in self._receivers:
            self._at(receiver.host.start_s, functools.partial(self._start, receiver))
        for server, host in enumerate(hosts):
            if host.death_s < _NEVER:
                self._at(host.death_s, functools.partial(self._die, server))

    def run(self) -> Outcome:
        while any(not each.is_dead and each.number not in self._end_s for each in self._receivers):
            self._go_on()
        num_sources, size = len(self._fetch.sources), self._fetch.chunk_bytes
        stops = {each.number: each.machine.stopped for each in self._receivers if each.number in self._end_s}
        return Outcome(
            end_s=self._end_s,
            errors={number: stop.error for number, stop in stops.items() if stop and stop.error},
            from_sources_bytes=[number * size for number in self._num_sent[:num_sources]],
            relayed_bytes=[number * size for number in self._num_sent[num_sources:]],
            num_requests=self._num_requests,
        )

    def _go_on(self) -> None:
        """To the next moment at which something happens."""
        timer_s = self._timers[0][0] if self._timers else _NEVER
        next_s = min(timer_s, self._links.next_s(self._now_s, self._resolution_s))
        assert next_s < self._fetch.longest_s, "it hangs"
        done = self._links.advance(next_s - self._now_s)
        self._now_s = next_s
        for slot in done:
            self._chunk_came(slot)
        while self._timers and self._timers[0][0] <= self._now_s:
            heapq.heappop(self._timers)[2]()

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when_s, next(self._order), action))

    def _start(self, receiver: _Receiver) -> None:
        receiver.idle = list(range(receiver.num_workers))
        self._give_work(receiver)
        self._look_in(receiver)

    def _look_in(self, receiver: _Receiver) -> None:
        """A waiting thread of the pool tells the machine how much time has passed, and comes again."""
        if receiver.is_dead or receiver.number in self._end_s:
            return
        if receiver.idle and receiver.machine.time_passed(self._now_s - receiver.host.start_s):
            self._give_work(receiver)
        self._at(self._now_s + _TICK_S, functools.partial(self._look_in, receiver))

    def _die(self, server: int) -> None:
        self._is_dead[server] = True
        number = server - len(self._fetch.sources)
        if number >= 0:
            dead = self._receivers[number]
            dead.is_dead = True
            for exchange in list(dead.exchanges.values()):
                self._end(exchange)
        for receiver in self._receivers:
            for exchange in list(receiver.exchanges.values()):
                if exchange.server == server and not receiver.is_dead:
                    if exchange.relay is not None and exchange.num_sent:
                        # It might as well have no more; the next request tells.
                        receiver.connected.discard((exchange.worker, server))
                        self._cut(exchange)
                    else:
                        self._fail(exchange, PeerUnreachableError("it has gone"))

    def _give_work(self, receiver: _Receiver) -> None:
        """What the threads of the pool do that wait for a change."""
        waiting, receiver.idle = receiver.idle, []
        for worker in waiting:
            if receiver.is_dead:
                return
            instruction = receiver.machine.next(WorkerIndex(worker))
            if isinstance(instruction, Stop):
                self._stop(receiver)
                return
            if isinstance(instruction, Request):
                self._ask(receiver, worker, instruction)
                continue
            receiver.idle.append(worker)
            if isinstance(instruction, Interrupt):
                interrupted = receiver.exchanges.get(instruction.worker)
                if interrupted is not None:
                    # Its own thread tells the machine, as soon as it notices.
                    receiver.connected.discard((interrupted.worker, interrupted.server))
                    self._end(interrupted)
                    failed = functools.partial(self._failed, interrupted, PeerUnreachableError("interrupted"))
                    self._at(self._now_s, failed)

    def _stop(self, receiver: _Receiver) -> None:
        if receiver.number not in self._end_s:
            self._end_s[receiver.number] = self._now_s
        for exchange in list(receiver.exchanges.values()):
            self._end(exchange)

    def _ask(self, receiver: _Receiver, worker: int, request: Request[int]) -> None:
        self._num_requests += 1
        fetch, num_each = self._fetch, receiver.fleet.num_sources
        if request.source < num_each:
            relay, server = None, receiver.own_sources[request.source]
        else:
            relay = self._receivers[receiver.fleet.receiver_of(request.source)]
            server = len(fetch.sources) + relay.number
        places = range(len(request.units))
        wanted = dict(zip(request.units, places, strict=True)) if relay is not None else {}
        exchange = _Exchange(receiver, worker, request, relay, server, wanted, [] if relay is not None else [*places])
        receiver.exchanges[worker] = exchange
        cost_s = request.delay_s + fetch.request_s
        if (worker, server) not in receiver.connected:
            receiver.connected.add((worker, server))
            cost_s += fetch.connection_s
        self._at(self._now_s + cost_s, lambda: self._arrive(exchange))

    def _arrive(self, exchange: _Exchange) -> None:
        if exchange.is_over:
            return
        relay = exchange.relay
        if self._is_dead[exchange.server]:
            self._fail(exchange, PeerUnreachableError("it has gone"))
            return
        if relay is not None:
            exchange.ready += [exchange.wanted.pop(chunk) for chunk in exchange.request.units if relay.landed[chunk]]
            relay.followers[id(exchange)] = exchange
        if exchange.ready:
            self._send_next(exchange)
        else:
            self._hold(exchange, self._fetch.relay_wait_s)

    def _hold(self, exchange: _Exchange, longest_s: float) -> None:
        self._at(self._now_s + longest_s, functools.partial(self._let_go, exchange, exchange.num_sent))

    def _let_go(self, exchange: _Exchange, num_sent: int) -> None:
        if exchange.is_over or exchange.sending is not None or exchange.num_sent != num_sent:
            return
        if num_sent:
            self._cut(exchange)
        else:
            self._fail(exchange, PeerNotReadyError("nothing yet", retry_after_s=0.0))

    def _send_next(self, exchange: _Exchange) -> None:
        exchange.sending = exchange.request.units[heapq.heappop(exchange.ready)]
        slot = self._slot(exchange)
        to = len(self._fetch.sources) + exchange.receiver.number
        if self._by_slot[slot] is exchange:
            self._links.go_on(slot, self._fetch.chunk_bytes)
        else:
            self._by_slot[slot] = exchange
            self._links.begin(slot, exchange.server, to, self._fetch.chunk_bytes)

    def _slot(self, exchange: _Exchange) -> int:
        return exchange.receiver.number * exchange.receiver.num_workers + exchange.worker

    def _chunk_came(self, slot: int) -> None:
        exchange = self._by_slot[slot]
        if exchange is None or exchange.is_over or exchange.sending is None:
            return
        receiver, worker, chunk = exchange.receiver, WorkerIndex(exchange.worker), exchange.sending
        exchange.sending = None
        exchange.num_sent += 1
        self._num_sent[exchange.server] += 1
        assert not receiver.landed[chunk], "nothing is fetched twice"
        receiver.landed[chunk] = 1
        receiver.num_landed += 1
        if exchange.relay is not None:
            receiver.furthest = max(receiver.furthest, exchange.relay.num_landed, exchange.relay.furthest)
            receiver.work.report_progress(receiver.furthest)
        for follower in list(receiver.followers.values()):
            if chunk in follower.wanted:
                heapq.heappush(follower.ready, follower.wanted.pop(chunk))
                if follower.sending is None:
                    self._send_next(follower)
        may_take = receiver.machine.unit_landed(worker, chunk)
        if exchange.num_sent < len(exchange.request.units) and receiver.machine.has_request(worker):
            if exchange.ready:
                self._send_next(exchange)
            else:
                self._by_slot[slot] = None
                self._links.end(slot)
                self._hold(exchange, self._fetch.relay_pause_s)
            if may_take:
                self._give_work(receiver)
            return
        self._cut(exchange)

    def _cut(self, exchange: _Exchange) -> None:
        """Its answer has ended, whole or not."""
        receiver = exchange.receiver
        self._end(exchange)
        receiver.machine.request_cut(WorkerIndex(exchange.worker))
        receiver.idle.append(exchange.worker)
        self._give_work(receiver)

    def _fail(self, exchange: _Exchange, error: TransportError) -> None:
        if not exchange.is_over:
            self._end(exchange)
            if not isinstance(error, PeerNotReadyError):
                exchange.receiver.connected.discard((exchange.worker, exchange.server))
            self._failed(exchange, error)

    def _failed(self, exchange: _Exchange, error: TransportError) -> None:
        receiver = exchange.receiver
        if not receiver.is_dead and receiver.number not in self._end_s:
            receiver.machine.request_failed(WorkerIndex(exchange.worker), error)
            receiver.idle.append(exchange.worker)
            self._give_work(receiver)

    def _end(self, exchange: _Exchange) -> None:
        exchange.is_over = True
        if exchange.relay is not None:
            exchange.relay.followers.pop(id(exchange), None)
        if exchange.receiver.exchanges.get(exchange.worker) is exchange:
            del exchange.receiver.exchanges[exchange.worker]
        slot = self._slot(exchange)
        if self._by_slot[slot] is exchange:
            self._by_slot[slot] = None
            self._links.end(slot)


class _Links:
    """What goes over the links at the moment, one slot for each worker of each receiver."""

    def __init__(self, rates: np.ndarray, num_slots: int) -> None:
        self._capacity = np.concatenate([rates, rates])
        self._num_hosts = len(rates)
        self._is_active = np.zeros(num_slots, dtype=bool)
        self._up = np.zeros(num_slots, dtype=np.int64)
        self._down = np.zeros(num_slots, dtype=np.int64)
        self._left_bytes = np.zeros(num_slots)
        self._rate = np.zeros(num_slots)
        self._is_stale = False
        self._shared_s = -_NEVER

    def begin(self, slot: int, sender: int, receiver: int, num_bytes: int) -> None:
        self._is_active[slot] = True
        self._up[slot], self._down[slot] = sender, self._num_hosts + receiver
        self._left_bytes[slot], self._rate[slot] = num_bytes, 0.0
        self._is_stale = True

    def go_on(self, slot: int, num_bytes: int) -> None:
        self._left_bytes[slot] += num_bytes

    def end(self, slot: int) -> None:
        self._is_active[slot], self._rate[slot] = False, 0.0
        self._is_stale = True

    def next_s(self, now_s: float, resolution_s: float) -> float:
        """When the next chunk is there, or rates change."""
        share_s = _NEVER
        if self._is_stale:
            share_s = max(now_s, self._shared_s + resolution_s)
            if share_s <= now_s:
                self._share()
                self._is_stale, self._shared_s, share_s = False, now_s, _NEVER
        moving = self._rate > 0
        if not moving.any():
            return share_s
        return min(share_s, now_s + max(0.0, float((self._left_bytes[moving] / self._rate[moving]).min())))

    def advance(self, elapsed_s: float) -> list[int]:
        """Returns the slots whose chunk is there."""
        self._left_bytes -= self._rate * elapsed_s
        return [int(slot) for slot in np.flatnonzero((self._left_bytes <= 1.0) & self._is_active)]

    def _share(self) -> None:
        """Max-min fairly: the fullest link gives all that goes over it the same; what is left is shared by others."""
        slots = np.flatnonzero(self._is_active)
        up, down = self._up[slots], self._down[slots]
        left = self._capacity.copy()
        rate = np.zeros(len(slots))
        is_open = np.ones(len(slots), dtype=bool)
        while is_open.any():
            num_users = np.bincount(up[is_open], minlength=len(left)) + np.bincount(down[is_open], minlength=len(left))
            share = np.where(num_users > 0, left / np.maximum(num_users, 1), _NEVER)
            least = share.min()
            is_full = share <= least * _NEARLY
            now = is_open & (is_full[up] | is_full[down])
            rate[now] = np.minimum(share[up[now]], share[down[now]])
            for ends in (up, down):
                left -= np.bincount(ends[now], weights=rate[now], minlength=len(left))
            np.maximum(left, 1.0, out=left)
            is_open &= ~now
        self._rate[:] = 0.0
        self._rate[slots] = rate
