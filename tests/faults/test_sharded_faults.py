"""Several sources, one of which dies, lies or stalls: another with the same part stands in, or there is an error."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_transports import TIMEOUT, closed_port, fetching_threads, port_of, transport
from proxy import Fault, Proxy, corrupt, cut, proxied, stall
from sharded_tools import mesh_of, part_of
from torch.distributed.tensor import DTensor, Replicate, Shard

from ft_transport import (
    ConfigurationError,
    FetchFailedError,
    FetchProgress,
    FetchTimeout,
    HTTPTransport,
    IntegrityError,
    PeerUnreachableError,
    RestoreError,
    SnapshotReplacedError,
    StepNotServedError,
    TransportError,
)
from ft_transport.transfer.sources import with_restarts

pytestmark = pytest.mark.usefixtures("one_rank_group")

WHOLE = torch.arange(4 << 20, dtype=torch.float32).view(4096, 1024)  # 16 MiB
SMALL = torch.arange(7.0)
ON = "/slices"


@dataclass
class Group:
    """Four ranks in two rows that hold the same, each behind a proxy; and a receiver that is one of two ranks."""

    senders: list[HTTPTransport[Any]]
    proxies: list[Proxy]
    receiver: HTTPTransport[Any]

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies]

    def own(self, at: Any = None) -> dict[str, Any]:
        mesh = mesh_of((2,), 1)
        at = at if at is not None else Shard(0)
        return {
            "w": part_of(torch.zeros_like(WHOLE), mesh, [at]),
            "small": part_of(torch.zeros_like(SMALL), mesh, [Shard(0)]),
        }

    def fetch(self, into: Any, *, timeout: timedelta = TIMEOUT, sources: list[str] | None = None) -> Any:
        return self.receiver.fetch_sharded(sources or self.urls, 1, into=into, group_rank=1, timeout=timeout).state


@contextmanager
def group(*, num_chunks: int = 2, **settings: Any) -> Iterator[Group]:
    with ExitStack() as stack:
        senders, proxies = [], []
        for rank in range(4):
            mesh = mesh_of((2, 2), rank, "replicate", "shard")
            at = [Replicate(), Shard(0)]
            senders.append(stack.enter_context(transport()))
            state = {"w": part_of(WHOLE, mesh, at), "small": part_of(SMALL, mesh, at), "step": 1}
            senders[-1].send_checkpoint([], 1, state, TIMEOUT)
            proxies.append(stack.enter_context(proxied(port_of(senders[-1]))))
        yield Group(senders, proxies, stack.enter_context(transport(num_chunks, **settings)))


def is_received(state: dict[str, Any], at: Any = None) -> bool:
    mesh = mesh_of((2,), 1)
    expected = part_of(WHOLE, mesh, [at if at is not None else Shard(0)])
    return torch.equal(state["w"].to_local(), expected.to_local()) and torch.equal(
        state["small"].to_local(), part_of(SMALL, mesh, [Shard(0)]).to_local()
    )


@pytest.mark.parametrize("at", [Shard(0), Shard(1)], ids=str)
def test_what_two_have_each_serves_half_of_and_once(at: Shard) -> None:
    with group() as ranks:
        into = ranks.own(at)
        received = ranks.fetch(into)
        assert received["w"] is into["w"]
        assert is_received(received, at)
        part_bytes = into["w"].to_local().nbytes
        served = [proxy.num_bytes for proxy in ranks.proxies]
        assert sum(served) < part_bytes * 1.02
        # Rows of the mesh hold the same: ranks 0 and 2 the first half of dimension 0, 1 and 3 the second.
        holders = (1, 3) if at == Shard(0) else (0, 1, 2, 3)
        for rank in range(4):
            share = served[rank] / sum(served) * len(holders) / 2
            assert (0.4 <= share <= 0.6) if rank in holders else share < 0.02


def test_a_whole_state_is_read_once_from_all_that_have_it() -> None:
    """What is written to durable storage: each byte once, whoever has it, no matter how often it exists."""
    with group() as ranks:
        received = ranks.receiver.fetch_sharded(ranks.urls, 1).state
        assert torch.equal(received["w"], WHOLE)
        assert torch.equal(received["small"], SMALL)
        served = [proxy.num_bytes for proxy in ranks.proxies]
        assert sum(served) < WHOLE.nbytes * 1.02
        for first, second in ((0, 2), (1, 3)):
            assert 0.4 <= served[first] / (served[first] + served[second]) <= 0.6


@pytest.mark.parametrize("fault", [cut(2 << 20), stall(2 << 20)], ids=["cut", "stall"])
def test_a_source_that_dies_or_stalls_is_stood_in_for_by_another(fault: Fault) -> None:
    with group(stall_timeout=timedelta(seconds=1)) as ranks:
        ranks.proxies[1].inject(fault, on=ON, times=100)
        into = ranks.own()
        assert is_received(ranks.fetch(into))
        assert ranks.proxies[1].num_faulty
        # What had landed was not asked for again.
        assert sum(proxy.num_bytes for proxy in ranks.proxies) < into["w"].to_local().nbytes + (12 << 20)


def test_a_damaged_frame_is_fetched_again() -> None:
    with group() as ranks:
        ranks.proxies[1].inject(corrupt(3 << 20), on=ON)
        ranks.proxies[3].inject(corrupt(1 << 20), on=ON)
        assert is_received(ranks.fetch(ranks.own(Shard(1))), Shard(1))
        assert [ranks.proxies[rank].num_faulty for rank in (1, 3)] == [1, 1]


@pytest.mark.parametrize(
    ("fault", "expected"), [(cut(2 << 20), PeerUnreachableError), (corrupt(1 << 20), IntegrityError)]
)
def test_if_all_that_have_a_part_fail_nothing_of_the_state_is_left(fault: Fault, expected: type[Exception]) -> None:
    with group(max_failures=2) as ranks:
        for rank in (1, 3):
            ranks.proxies[rank].inject(fault, on=ON, times=100)
        into = ranks.own()
        with pytest.raises(FetchFailedError, match="no other source that answers has its part of w") as caught:
            ranks.fetch(into)
        assert f"127.0.0.1:{ranks.proxies[1].port}" in str(caught.value)
        assert caught.value.path == "w"
        assert caught.value.destination_touched
        assert all(isinstance(failure, expected) for failure in caught.value.failures)
        assert into["w"].to_local().isnan().all()
        assert not fetching_threads()


def test_a_rank_too_few_is_noticed_before_the_first_byte() -> None:
    with group() as ranks:
        into = ranks.own(Shard(1))
        with pytest.raises(RestoreError, match=r"pass all ranks of the replica as sources \(at w, step 1\)") as caught:
            ranks.fetch(into, sources=[ranks.urls[0], ranks.urls[2]])
        assert not caught.value.destination_touched
        assert not into["w"].to_local().any()


def test_a_source_that_is_out_of_reach_is_not_needed_if_another_has_its_part() -> None:
    gone = f"http://127.0.0.1:{closed_port()}/checkpoint/"
    with group() as ranks:
        for missing in (1, 3):  # the first of these is what is not sharded comes from
            sources = [gone if rank == missing else url for rank, url in enumerate(ranks.urls)]
            into = ranks.own(Shard(1))
            received = ranks.receiver.fetch_sharded(
                sources,
                1,
                into=into,
                group_rank=1,
                timeout=FetchTimeout(total=TIMEOUT, unreachable=timedelta(seconds=0.3)),
            )
            assert is_received(received.state, Shard(1))


def test_a_source_that_hangs_is_not_waited_for_if_another_has_its_part() -> None:
    with group() as ranks, socket.create_server(("127.0.0.1", 0)) as mute:
        sources = [*ranks.urls[:3], f"http://127.0.0.1:{mute.getsockname()[1]}/checkpoint/"]
        started_s = time.monotonic()
        assert is_received(ranks.fetch(ranks.own(), sources=sources))
        assert time.monotonic() - started_s < TIMEOUT.total_seconds() / 2


def test_a_source_that_is_out_of_reach_and_needed_is_named() -> None:
    port = closed_port()
    with group() as ranks:
        sources = [ranks.urls[0], f"http://127.0.0.1:{port}/checkpoint/"]
        with pytest.raises(RestoreError, match=f"pass all ranks.*unreachable sources: .*127.0.0.1:{port}"):
            ranks.fetch(ranks.own(Shard(1)), sources=sources, timeout=timedelta(seconds=2))


def test_the_first_source_dies_and_all_that_is_not_sharded_comes_from_another() -> None:
    with group(max_failures=1) as ranks:
        for rank, sender in enumerate(ranks.senders):
            mesh = mesh_of((2, 2), rank, "replicate", "shard")
            state = {
                "w": part_of(WHOLE, mesh, [Replicate(), Shard(0)]),
                "plain": [torch.full((1 << 19,), float(rank)) for _ in range(8)],
            }
            sender.send_checkpoint([], 2, state, TIMEOUT)
        ranks.proxies[1].inject(cut(6 << 20), on=ON, times=100)
        own = {"w": ranks.own()["w"], "plain": [torch.zeros(1 << 19) for _ in range(8)]}
        ranks.receiver.fetch_sharded(ranks.urls, 2, into=own, group_rank=1)
        assert ranks.proxies[1].num_faulty
        values = {tensor.unique().item() for tensor in own["plain"]}
        assert len(values) == 1
        assert values != {1.0}
        assert torch.equal(own["w"].to_local(), part_of(WHOLE, mesh_of((2,), 1), [Shard(0)]).to_local())


def test_two_replicas_are_no_sources_for_one_state() -> None:
    with group() as ranks, group() as others:
        with pytest.raises(RestoreError, match=r"expected the ranks of one replica as sources.*at w"):
            ranks.fetch(ranks.own(), sources=[*ranks.urls, *others.urls])
        # The same one named twice does no harm.
        assert is_received(ranks.fetch(ranks.own(), sources=[*ranks.urls, ranks.urls[2]]))


@pytest.mark.parametrize("last", [KeyError("another state"), TransportError("no more sources")])
def test_the_last_error_reports_bytes_that_an_earlier_attempt_wrote(last: Exception) -> None:
    """A first attempt writes bytes, and its snapshot is replaced. The receiver or a source ends the next attempt."""
    attempts: list[TransportError] = []

    def receive() -> Any:
        if attempts:
            raise last
        replaced = SnapshotReplacedError("gone")
        replaced.destination_touched = True
        attempts.append(replaced)
        raise replaced

    with transport() as receiver:
        with pytest.raises(type(last)) as caught:
            with_restarts(receiver._client.group_fetch_settings(None), receive)
        assert caught.value.destination_touched  # type: ignore[attr-defined]


def test_a_callback_that_raises_ends_it() -> None:
    def refuse(_progress: FetchProgress) -> None:
        raise KeyError("no more")

    with group(on_progress=refuse) as ranks:
        into = ranks.own()
        with pytest.raises(Exception, match="the receiver failed: KeyError"):
            ranks.fetch(into)
        assert into["w"].to_local().isnan().any()
        assert not fetching_threads()


def test_a_state_that_is_replaced_meanwhile_is_received_anew_or_not_at_all() -> None:
    """Every rank serves one snapshot; a newer one takes its place between the manifest and the data."""
    replaced = threading.Event()

    with group() as ranks:

        def replace(_incoming: object) -> None:
            if not replaced.is_set():
                replaced.set()
                for rank, sender in enumerate(ranks.senders):
                    mesh = mesh_of((2, 2), rank, "replicate", "shard")
                    state = {
                        "w": part_of(-WHOLE, mesh, [Replicate(), Shard(0)]),
                        "small": part_of(-SMALL, mesh, [Replicate(), Shard(0)]),
                        "step": 1,
                    }
                    for _ in range(2):  # As many as there may be.
                        sender.send_checkpoint([], 1, state, TIMEOUT)

        into = ranks.own()
        received = ranks.receiver.fetch_sharded(ranks.urls, 1, into=into, group_rank=1, check=replace)
        whole = part_of(WHOLE, mesh_of((2,), 1), [Shard(0)]).to_local()
        assert isinstance(into["w"], DTensor)
        # The connections that asked for the manifests keep the first snapshot, so that it is received as it was.
        assert torch.equal(into["w"].to_local(), whole) or torch.equal(into["w"].to_local(), -whole)
        assert received.state["small"] is into["small"]
        sign = into["w"].to_local().flatten()[-1].sign()
        assert torch.equal(into["small"].to_local(), sign * part_of(SMALL, mesh_of((2,), 1), [Shard(0)]).to_local())


def test_no_sources_are_no_sources() -> None:
    with transport() as receiver:
        for sources in ([], "http://127.0.0.1:1/checkpoint/"):
            with pytest.raises(ConfigurationError, match="URLs of one or more sources"):
                receiver.fetch_sharded(sources, 1, into={})


def test_a_step_that_a_source_is_past_is_refused_at_once() -> None:
    with group() as ranks:
        for sender in ranks.senders:
            sender.serve_fresh(lambda step: 0 if step is None or step > 5 else None)
        with pytest.raises(StepNotServedError, match="is past step 3") as caught:
            ranks.receiver.fetch_sharded(ranks.urls, 3, into=ranks.own())
        assert caught.value.is_past
