"""A real S3 server (moto) on the loopback, and a proxy before it that injects faults and counts bytes.

moto keeps objects in the memory of this process. It checks no signatures, and follows conditional writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from ft_transport.checkpoint.bucket_files import list_objects, open_bucket

BUCKET: Final = "bucket"
_SLOW_DOWN: Final = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_EXPIRED: Final = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_SKEWED: Final = "<Error><Code>RequestTimeTooSkewed</Code><Message>The times differ too much.</Message></Error>"
_DENIED: Final = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
REFUSALS: Final = {
    "slow down": (503, _SLOW_DOWN),
    "expired": (403, _EXPIRED),
    "skewed": (403, _SKEWED),
    "denied": (403, _DENIED),
}
LOST: Final = ("cut before", "cut after")
"""The connection ends before the server has the request, or after it has carried the request out."""

Fault = Callable[[str, str], str | None]
"""Returns the fault of a request, given its method and path: a key of `REFUSALS` or one of `LOST`."""


def no_fault(_method: str, _path: str) -> str | None:
    return None


@dataclass
class Bucket:
    """A bucket behind a proxy.

    Attributes:
        port: Port of the proxy.
        fault: The fault of each request.
        dropped: Headers of requests that the server ignores.
        requests: Number of requests by method and path.
        put_bytes: Number of bytes that were sent to the server, by path.
    """

    port: int
    fault: Fault = no_fault
    dropped: tuple[str, ...] = ()
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    put_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="tester",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def objects(self, root: str) -> list[str]:
        """Return the paths of all objects under a URL."""
        return sorted(list_objects(open_bucket(root)))


@contextmanager
def served_bucket() -> Iterator[Bucket]:
    """Serve an empty bucket, until the block ends."""
    # Here, so that the collection of tests does not wait for them.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    # moto's own class looks for the end every half second.
    serving = threading.Thread(target=server.serve_forever, args=(0.01,), name="moto", daemon=True)
    serving.start()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy of a bucket")
    thread.start()
    stack = ExitStack()
    try:
        upstream = f"http://127.0.0.1:{server.server_port}"
        stack.callback(_forget, upstream)
        bucket = Bucket(0)
        runner = asyncio.run_coroutine_threadsafe(_start(bucket, upstream), loop).result(30)
        try:
            client = bucket.client()
            client.create_bucket(Bucket=BUCKET)
            client.close()
            yield bucket
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    finally:
        open_bucket.cache_clear()  # with the library's connections
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        stack.close()
        gc.collect()
        server.shutdown()
        serving.join()
        server.server_close()


def _forget(upstream: str) -> None:
    """Delete all objects, which moto would keep for as long as the process runs."""
    urllib.request.urlopen(f"{upstream}/moto-api/reset", data=b"", timeout=30).close()


@contextmanager
def used_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Serve a bucket that this process and its children use through the environment."""
    with served_bucket() as bucket:
        for name, text in bucket.environment().items():
            monkeypatch.setenv(name, text)
        yield bucket


async def _start(bucket: Bucket, upstream: str) -> web.AppRunner:
    app = web.Application(client_max_size=1 << 32)
    app.cleanup_ctx.append(lambda each: _serving(each, bucket, upstream))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    bucket.port = runner.addresses[0][1]
    return runner


async def _serving(app: web.Application, bucket: Bucket, upstream: str) -> Any:
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            method, path = request.method, request.path
            bucket.requests[method, path] += 1
            fault = bucket.fault(method, path)
            if fault in REFUSALS:
                status, text = REFUSALS[fault]
                return web.Response(status=status, text=text, content_type="application/xml")
            if fault == "cut before":
                return _cut(request)
            headers = {
                name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")
            }
            for name in bucket.dropped:
                headers.pop(name, None)
            if method == "PUT":
                bucket.put_bytes[path.removeprefix(f"/{BUCKET}/")] += len(body)
            async with session.request(
                method, upstream + request.raw_path, data=io.BytesIO(body), headers=headers
            ) as answer:
                content = await answer.read()
                if fault == "cut after":
                    return _cut(request)
                kept = {
                    name: value
                    for name, value in answer.headers.items()
                    if name.lower() not in ("content-length", "transfer-encoding", "connection")
                }
                if method == "HEAD":
                    kept["Content-Length"] = answer.headers.get("Content-Length", "0")
                return web.Response(status=answer.status, body=content if method != "HEAD" else None, headers=kept)

        app.router.add_route("*", "/{tail:.*}", forward)
        yield


def _cut(request: web.Request) -> web.StreamResponse:
    with contextlib.suppress(AttributeError):
        request.transport.abort()  # type: ignore[union-attr]
    return web.Response()
