"""Two hosts in network namespaces that reach each other over a fast and over a slow interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from benchmarks.network_namespaces import enter, why_not

T = TypeVar("T")

FAST, SLOW = "fast0", "slow0"
FAST_BITS, SLOW_BITS = 2_000_000_000, 50_000_000
"""One 40 times as fast as the other."""
SOURCE = {FAST: "10.77.1.1", SLOW: "10.77.2.1"}
RECEIVER = {FAST: "10.77.1.2", SLOW: "10.77.2.2"}
_LONG_S = 60.0


def why_no_networks() -> str | None:
    """Why they cannot be made here, or ``None``."""
    return why_not() if shutil.which("ip") else "expected the tools of iproute2"


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Yields the names of the namespaces of a source and of a receiver."""
    source, receiver = (f"ft-test-{os.getpid()}-{name}" for name in ("source", "receiver"))
    try:
        for namespace in (source, receiver):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        for name, bits in ((FAST, FAST_BITS), (SLOW, SLOW_BITS)):
            _run("ip", "-n", source, "link", "add", name, "type", "veth", "peer", "name", name, "netns", receiver)
            for namespace, addresses in ((source, SOURCE), (receiver, RECEIVER)):
                _run("ip", "-n", namespace, "address", "add", f"{addresses[name]}/24", "dev", name)
                _run("ip", "-n", namespace, "link", "set", name, "up")
                limit = f"rate {bits}bit burst 256k limit 4m".split()
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", name, "root", "tbf", *limit)
        yield source, receiver
    finally:
        for namespace in (source, receiver):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False, timeout=_LONG_S)


def run_in(namespace: str, function: Callable[[], T]) -> T:
    """Calls a function on a thread that is in a namespace, with all threads that it starts."""
    results: list[Any] = []

    def run() -> None:
        try:
            enter(namespace)
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(_LONG_S)
    assert results, "it did not end"
    result, error = results[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONG_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
