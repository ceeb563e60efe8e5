"""Which order is carried out when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from ft_transport.errors import TransportError
from ft_transport.http.client.fetch_settings import FetchHandle
from ft_transport.publish.engines.pulling import Order
from ft_transport.publish.order_queue import OrderQueue, OrderRefusedError


class Fetching:
    """Fetches that last until they are told to end, or are cancelled."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.bytes_per_look = 0

    def __call__(self, order: Order, handle: FetchHandle) -> None:
        self.begun.append((order.address, order.version))
        self.has_begun.set()
        while not self.may_end.wait(0.01):
            handle.num_bytes += self.bytes_per_look
            if handle.reason:
                raise TransportError(handle.reason)


def order(source: str, version: int) -> Order:
    return Order(version=version, address=f"http://{source}:80/")


def run(scenario: Callable[[OrderQueue, Fetching], Awaitable[None]], *, patience_s: float = 60.0) -> Fetching:
    fetching = Fetching()

    async def main() -> None:
        queue = OrderQueue(fetching, patience_s=patience_s)
        try:
            await scenario(queue, fetching)
        finally:
            fetching.may_end.set()
            await queue.close()

    asyncio.run(main())
    return fetching


def begin(queue: OrderQueue, what: Order) -> asyncio.Task[None]:
    return asyncio.ensure_future(queue.carry_out(what))


async def reason_of(task: Awaitable[None]) -> str:
    with suppress(asyncio.CancelledError):
        try:
            await task
        except OrderRefusedError as error:
            return error.reason
        except TransportError as error:
            return str(error)
    return ""


def test_one_at_a_time_and_of_each_source_the_latest() -> None:
    async def scenario(queue: OrderQueue, fetching: Fetching) -> None:
        first = begin(queue, order("a", 1))
        await asyncio.to_thread(fetching.has_begun.wait, 10)
        second, other, third = begin(queue, order("a", 2)), begin(queue, order("b", 9)), begin(queue, order("a", 3))
        assert await reason_of(second) == "superseded"
        assert await reason_of(queue.carry_out(order("a", 2))) == "stale"
        fetching.may_end.set()
        assert [await reason_of(each) for each in (first, other, third)] == [""] * 3
        # Another source is not compared.
        assert await reason_of(queue.carry_out(order("c", 1))) == ""
        assert await reason_of(queue.carry_out(order("a", 1))) == ""
        assert await reason_of(queue.carry_out(order("a", 0))) == "stale"

    begun = run(scenario).begun
    assert [(source.split("/")[2], version) for source, version in begun] == [
        ("a:80", 1), ("a:80", 3), ("b:80", 9), ("c:80", 1), ("a:80", 1),
    ]  # fmt: skip


def test_those_that_wait_are_few() -> None:
    async def scenario(queue: OrderQueue, fetching: Fetching) -> None:
        tasks = [begin(queue, order("running", 1))]
        await asyncio.to_thread(fetching.has_begun.wait, 10)
        tasks += [begin(queue, order(f"host-{number}", 1)) for number in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = [task for task in tasks if task.done()]
        assert [await reason_of(each) for each in refused] == ["busy"] * 12
        fetching.may_end.set()
        assert [await reason_of(each) for each in tasks if each not in refused] == [""] * 9

    run(scenario)


@pytest.mark.parametrize("is_fast", [False, True])
def test_one_that_is_slow_gives_way_to_one_that_waits(is_fast: bool) -> None:
    async def scenario(queue: OrderQueue, fetching: Fetching) -> None:
        fetching.bytes_per_look = (1 << 20) if is_fast else 100
        first = begin(queue, order("a", 1))
        await asyncio.to_thread(fetching.has_begun.wait, 10)
        fetching.has_begun.clear()
        # Alone it may take as long as it likes.
        done, _ = await asyncio.wait({first}, timeout=0.15)
        assert not done
        second = begin(queue, order("b", 1))
        done, _ = await asyncio.wait({first}, timeout=0.25 if is_fast else 10)
        assert bool(done) is not is_fast
        fetching.may_end.set()
        assert ("another order waits" in await reason_of(first)) is not is_fast
        assert await reason_of(second) == ""

    run(scenario, patience_s=0.05)


def test_closing_ends_what_runs_and_refuses_what_waits() -> None:
    async def scenario(queue: OrderQueue, fetching: Fetching) -> None:
        first = begin(queue, order("a", 1))
        await asyncio.to_thread(fetching.has_begun.wait, 10)
        second = begin(queue, order("b", 1))
        await asyncio.sleep(0)
        await queue.close()
        assert await reason_of(first) == "the receiver is being closed"
        assert await reason_of(second) == "closing"
        assert await reason_of(queue.carry_out(order("c", 1))) == "closing"

    run(scenario)
