"""Who tells an engine what to fetch, and from where: strangers get nothing, and nobody holds the others up."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from proxy import proxied, trickle
from scripted_peer import Peer, answering, scripted
from served_memory import until
from transport_settings import settings_of

from ft_transport import (
    ConfigurationError,
    HTTPTransport,
    Publisher,
    PublishError,
    PullingEngine,
    WeightReceiver,
)
from ft_transport.credentials import Keys
from ft_transport.http.bind_address import can_bind
from ft_transport.publish import receiver as receiver_module
from ft_transport.publish.engines.pulling import Order, Question, reached_by

SOON = timedelta(seconds=30)
TOKEN = "a-secret-of-this-job"
HIGHEST = 999_999_999_999_999_999
HEAD = b"POST /weights/1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
Answer = tuple[int, dict[str, Any]]


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"layer": torch.full((1 << 18,), value)}


def ask(url: str, body: Mapping[str, object] | None = None, *, content_type: str = "application/json") -> Answer:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status), json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def order(receiver: WeightReceiver, version: int, address: str) -> Answer:
    """Without a token."""
    return ask(f"{receiver.url}/weights/{version}", {"address": address})


def signed_order(receiver: WeightReceiver, version: int, address: str) -> tuple[str, dict[str, object]]:
    """Where it is posted, and what."""
    keys = Keys.of(TOKEN)
    question = Question.of(receiver.url)
    status, said = ask(f"{receiver.url}/weights?{urlencode(question.query(keys))}")
    assert status == 200
    known = question.accepted(keys, said)
    assert known is not None
    made = Order(version=version, address=address, reached=question.reached, challenge=known[1])
    return f"{receiver.url}/weights/{version}", made.body(keys)


@contextmanager
def transport(version: int, value: float, **settings: Any) -> Iterator[HTTPTransport[Any]]:
    made: HTTPTransport[Any] = HTTPTransport(settings=settings_of(host="127.0.0.1", same_host=False, **settings))
    try:
        made.send_checkpoint([], version, {"weights": weights(value)}, SOON)
        yield made
    finally:
        made.shutdown()


class TestWhatIsFetched:
    def test_nothing_of_what_was_fetched_is_echoed(self) -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\nX: s3cret\r\n\r\nroot:s3cret:0:0:root:/root:/bin"
        with WeightReceiver(weights(), host="127.0.0.1") as receiver:
            for said in (answer, answer.replace(b"200 OK", b"403 s3cret"), b"SSH-2.0-s3cret\r\n"):
                with scripted(answering(said)) as port:
                    status, body = order(receiver, 1, f"http://127.0.0.1:{port}/checkpoint/")
                    assert status == 500
                    assert body == {"version": None, "reason": body["reason"]}
                    assert body["reason"] in ("source_failed", "source_unreachable", "too_slow")

    def test_a_source_with_tls_is_not_asked_without_a_certificate(self) -> None:
        with WeightReceiver(weights(), host="127.0.0.1") as receiver:
            status, body = order(receiver, 1, "https://127.0.0.1/")
            assert (status, body) == (500, {"version": None, "reason": "source_failed"})

    @pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "[::]", "[::ffff:192.0.2.1]", "169.254.169.254"])
    def test_without_a_token_it_fetches_from_the_loopback_alone(self, host: str) -> None:
        with WeightReceiver(weights(), host="127.0.0.1") as receiver:
            status, body = order(receiver, 1, f"http://{host}:80/checkpoint/")
            assert (status, body["reason"]) == (403, "source_refused")

    def test_a_name_is_judged_by_the_address_that_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is looked up once: a second look-up would lead elsewhere."""
        looked_up: list[str] = []
        real = socket.getaddrinfo

        def rebinding(host: str, *args: Any, **options: Any) -> Any:
            if host != "trainer.test":
                return real(host, *args, **options)
            looked_up.append(host)
            return real("127.0.0.1" if len(looked_up) == 1 else "127.0.0.2", *args, **options)

        contacted: list[str] = []

        def listening(peer: Peer) -> None:
            contacted.append(peer.request())
            peer.send(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        with scripted(listening) as port:
            source = f"http://trainer.test:{port}/checkpoint/"
            with WeightReceiver(weights(), host="127.0.0.1", sources=["127.0.0.2", "10.0.0.0/8"]) as receiver:
                assert order(receiver, 1, source)[1]["reason"] == "source_refused"
            assert not contacted
            looked_up.clear()
            with WeightReceiver(weights(), host="127.0.0.1", sources=["127.0.0.1/32"]) as receiver:
                assert order(receiver, 1, source)[1]["reason"] != "source_refused"
            assert contacted
            assert len(looked_up) == 1

    def test_sources_may_be_named(self) -> None:
        with transport(1, 1.0) as source, ExitStack() as stack:
            for sources, reason in (
                (["localhost"], None),
                (["192.0.2.0/24"], "source_refused"),
                ([], "source_refused"),
            ):
                receiver = stack.enter_context(WeightReceiver(weights(), host="127.0.0.1", sources=sources))
                assert order(receiver, 1, source.metadata())[1].get("reason") == reason

    @pytest.mark.parametrize("sources", ["10.0.0.0/8", ["10.0.0.0/99"], [""], ["two words"]])
    def test_sources_that_are_none_are_refused(self, sources: Any) -> None:
        with pytest.raises(ConfigurationError, match="sources"):
            WeightReceiver(weights(), host="127.0.0.1", sources=sources)

    def test_of_a_name_with_several_addresses_the_one_that_answers_is_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = socket.getaddrinfo

        def both(host: str, port: int, *args: Any, **options: Any) -> Any:
            if host != "trainer.test":
                return real(host, port, *args, **options)
            return [*real("127.0.0.2", port, *args, **options), *real("127.0.0.1", port, *args, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        own = weights()
        with transport(1, 1.0) as source, WeightReceiver(own, host="127.0.0.1") as receiver:
            url = source.metadata().replace("127.0.0.1", "trainer.test")
            assert order(receiver, 1, url) == (200, {"version": 1})
            assert torch.equal(own["layer"], weights(1.0)["layer"])

    def test_without_a_token_it_listens_on_the_loopback_alone(self) -> None:
        with WeightReceiver(weights()) as receiver:
            assert urlsplit(receiver.url).hostname in ("127.0.0.1", "::1")
        for host in ("0.0.0.0", "::", "192.0.2.1"):
            with pytest.raises(ConfigurationError, match="FT_TRANSPORT_TOKEN"):
                WeightReceiver(weights(), host=host)

    def test_a_page_in_a_browser_can_order_nothing(self) -> None:
        with transport(1, 1.0) as source, WeightReceiver(weights(), host="127.0.0.1") as receiver:
            url, body = f"{receiver.url}/weights/1", {"address": source.metadata()}
            for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                assert ask(url, body, content_type=content_type) == (400, {"version": None, "reason": "malformed"})
            assert receiver.version is None


class TestWhoOrders:
    def test_an_order_counts_once_and_as_it_was_signed(self, caplog: pytest.LogCaptureFixture) -> None:
        own = weights()
        with (
            caplog.at_level(logging.INFO, "ft_transport.publish"),
            transport(1, 1.0, token=TOKEN) as source,
            transport(1, 2.0, token=TOKEN) as other,
            WeightReceiver(own, host="127.0.0.1", token=TOKEN) as receiver,
        ):
            url, body = signed_order(receiver, 1, source.metadata())
            refused = [
                (url, {"address": source.metadata()}),
                (url.replace("weights/1", "weights/2"), body),
                (url, {**body, "address": other.metadata()}),
                (url, {**body, "challenge": "0" * 8}),
                (url, {**body, "signature": str(body["signature"])[:-1]}),
                (url, {**body, "signature": "é" * 81}),
            ]
            for where, what in refused:
                assert ask(where, what) == (401, {"version": None, "reason": "unproved"})
            assert receiver.version is None
            status, outcome = ask(url, body)
            assert (status, outcome["version"]) == (200, 1)
            # As it was, again.
            assert ask(url, body) == (401, {"version": None, "reason": "unproved"})
            assert ask(f"{receiver.url}/weights")[0] == 401
            assert torch.equal(own["layer"], weights(1.0)["layer"])
        told = [each.getMessage() for each in caplog.records if "127.0.0.1: an order was refused" in each.getMessage()]
        assert len(told) == 1
        assert TOKEN not in caplog.text
        assert str(body["signature"]) not in caplog.text

    def test_an_order_for_one_engine_moves_no_other(self) -> None:
        with (
            transport(1, 1.0, token=TOKEN) as source,
            WeightReceiver(weights(), host="127.0.0.1", token=TOKEN) as first,
            WeightReceiver(weights(), host="127.0.0.1", token=TOKEN) as second,
        ):
            url, body = signed_order(first, 1, source.metadata())
            assert ask(url.replace(first.url, second.url), body)[1]["reason"] == "reached_elsewhere"
            # An impostor at the address of the first asks the second for its challenge.
            keys = Keys.of(TOKEN)
            question = Question.of(first.url)
            status, said = ask(f"{second.url}/weights?{urlencode(question.query(keys))}")
            assert (status, said) == (403, {"version": None, "reason": "reached_elsewhere"})
            assert second.version is None

    def test_what_reaches_a_receiver_through_a_forwarded_port_is_named(self, tmp_path: Path) -> None:
        with transport(1, 1.0, token=TOKEN) as source, ExitStack() as stack:
            first = stack.enter_context(WeightReceiver(weights(), host="127.0.0.1", token=TOKEN))
            proxy = stack.enter_context(proxied(urlsplit(first.url).port or 0))
            url = f"http://127.0.0.1:{proxy.port}"
            engine = PullingEngine(url, token=TOKEN)
            with (
                Publisher([engine], tmp_path / "a", transport=source) as publisher,
                pytest.raises(PublishError, match="reached_at"),
            ):
                publisher.publish(1, weights(1.0)).result(SOON)
            second = stack.enter_context(
                WeightReceiver(weights(), host="127.0.0.1", token=TOKEN, reached_at=[reached_by(url)])
            )
            proxy.target_port = urlsplit(second.url).port or 0
            with Publisher([engine], tmp_path / "b", transport=source) as publisher:
                publisher.publish(1, weights(1.0)).result(SOON)
            assert second.version == 1

    def test_the_token_is_not_sent(self, tmp_path: Path) -> None:
        seen = bytearray()
        with transport(1, 1.0, token=TOKEN) as source, ExitStack() as stack:
            receiver = stack.enter_context(WeightReceiver(weights(), host="127.0.0.1", token=TOKEN))
            proxy = stack.enter_context(proxied(urlsplit(receiver.url).port or 0))
            proxy.watch = seen.extend
            engine = PullingEngine(f"http://127.0.0.1:{proxy.port}", token=TOKEN)
            publisher = stack.enter_context(Publisher([engine], tmp_path, transport=source))
            with contextlib.suppress(PublishError):
                publisher.publish(1, weights(1.0)).result(SOON)
            assert b"/weights?" in seen
            assert TOKEN.encode() not in seen

    @pytest.mark.parametrize("answer", [{"version": 1}, {"version": 1, "challenge": "x", "proof": "y"}, [], "no"])
    def test_an_impostor_confirms_nothing(self, tmp_path: Path, answer: object) -> None:
        body = json.dumps(answer).encode()
        script = answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        with scripted(script) as port, transport(1, 1.0, token=TOKEN) as source:
            engine = PullingEngine(f"http://127.0.0.1:{port}", token=TOKEN)
            with (
                Publisher([engine], tmp_path, transport=source) as publisher,
                pytest.raises(PublishError, match="to prove that it knows the job token"),
            ):
                publisher.publish(1, weights(1.0)).result(SOON)


class TestWhoHoldsUp:
    def test_a_high_number_of_one_source_blocks_no_other(self, tmp_path: Path) -> None:
        own = weights()
        with (
            transport(HIGHEST, 6.0) as forger,
            transport(0, 1.0) as source,
            WeightReceiver(own, host="127.0.0.1") as receiver,
        ):
            assert order(receiver, HIGHEST, forger.metadata()) == (200, {"version": HIGHEST})
            # Within a source numbers only go up.
            assert order(receiver, 5, forger.metadata()) == (409, {"version": HIGHEST, "reason": "stale"})
            with Publisher([PullingEngine(receiver.url)], tmp_path, transport=source) as publisher:
                publisher.publish(1, weights(1.0)).result(SOON)
            assert receiver.version == 1
            assert torch.equal(own["layer"], weights(1.0)["layer"])

    @pytest.mark.parametrize("how", ["silent", "trickling head", "trickling data"])
    def test_a_source_that_stalls_gives_way_to_another(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        own = weights()
        with ExitStack() as stack:
            source = stack.enter_context(transport(1, 1.0))
            if how == "trickling data":
                slow = stack.enter_context(transport(7, 7.0))
                proxy = stack.enter_context(proxied(urlsplit(slow.metadata()).port or 0))
                proxy.inject(trickle(8 << 10, pause_s=0.02), on="/full", times=99)
                stalling, is_under_way = proxy.url, lambda: proxy.num_faulty > 0
            else:
                asked = threading.Event()

                def stall(peer: Peer) -> None:
                    peer.request()
                    asked.set()
                    if how == "trickling head":
                        peer.trickle(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 60_000)
                    peer.hold()

                port = stack.enter_context(scripted(stall))
                stalling, is_under_way = f"http://127.0.0.1:{port}/checkpoint/", asked.is_set
            monkeypatch.setattr(receiver_module, "_PATIENCE_S", 0.5)
            receiver = stack.enter_context(WeightReceiver(own, host="127.0.0.1", timeout=SOON))
            outcomes: list[Answer] = []
            ordering = threading.Thread(target=lambda: outcomes.append(order(receiver, 7, stalling)))
            ordering.start()
            until(is_under_way)
            started_s = time.monotonic()
            assert order(receiver, 1, source.metadata()) == (200, {"version": 1})
            assert time.monotonic() - started_s < 5
            ordering.join()
            assert outcomes == [(500, {"version": None, "reason": "too_slow"})]
            assert torch.equal(own["layer"], weights(1.0)["layer"])

    def test_weights_of_which_a_part_had_landed_are_no_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = weights()
        with ExitStack() as stack:
            source = stack.enter_context(transport(1, 1.0))
            slow = stack.enter_context(transport(7, 7.0, chunk_bytes=64 << 10))
            proxy = stack.enter_context(proxied(urlsplit(slow.metadata()).port or 0))
            monkeypatch.setattr(receiver_module, "_PATIENCE_S", 0.5)
            receiver = stack.enter_context(WeightReceiver(own, host="127.0.0.1", timeout=SOON))
            assert order(receiver, 1, source.metadata()) == (200, {"version": 1})
            proxy.inject(trickle(160 << 10, pause_s=0.02), on="/full", times=99)
            ordering = threading.Thread(target=lambda: order(receiver, 7, proxy.url))
            ordering.start()
            until(lambda: proxy.num_bytes > 4 * (160 << 10))
            with scripted(answering(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")) as port:
                status, said = order(receiver, 1, f"http://127.0.0.1:{port}/checkpoint/")
            ordering.join()
            assert (status, said["version"]) == (500, None)
            assert receiver.version is None
            assert own["layer"].isnan().all()
            assert order(receiver, 1, source.metadata()) == (200, {"version": 1})
            assert torch.equal(own["layer"], weights(1.0)["layer"])

    @pytest.mark.parametrize(("bound", "host"), [("127.0.0.1", "localhost"), ("::1", "[::1]")])
    def test_an_engine_is_known_by_any_of_its_names(self, tmp_path: Path, bound: str, host: str) -> None:
        if not can_bind(bound):
            pytest.skip("this machine has no IPv6")
        with transport(1, 1.0, token=TOKEN) as source, WeightReceiver(weights(), host=bound, token=TOKEN) as receiver:
            engine = PullingEngine(f"http://{host}:{urlsplit(receiver.url).port}", token=TOKEN)
            with Publisher([engine], tmp_path, transport=source) as publisher:
                publisher.publish(1, weights(1.0)).result(SOON)
            assert receiver.version == 1

    def test_closing_does_not_wait_for_a_source_that_stalls(self) -> None:
        asked = threading.Event()

        def stall(peer: Peer) -> None:
            peer.request()
            asked.set()
            peer.hold()

        with scripted(stall) as port, ExitStack() as stack:
            receiver = stack.enter_context(WeightReceiver(weights(), host="127.0.0.1"))

            def ordering() -> None:
                with contextlib.suppress(OSError):
                    order(receiver, 1, f"http://127.0.0.1:{port}/checkpoint/")

            thread = threading.Thread(target=ordering)
            thread.start()
            assert asked.wait(10)
            started_s = time.monotonic()
            receiver.close()
            assert time.monotonic() - started_s < 3
            thread.join()

    def test_a_request_that_is_too_large_is_not_read(self) -> None:
        with WeightReceiver(weights(), host="127.0.0.1") as receiver:
            head = HEAD + b"999999999\r\n\r\n"
            with socket.create_connection(("127.0.0.1", urlsplit(receiver.url).port or 0), timeout=5) as sock:
                sock.sendall(head)
                sock.sendall(bytes(1 << 14))
                assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.001)
    try:
        return bool(sock.recv(65536))
    except TimeoutError:
        return True
    except OSError:
        return False
