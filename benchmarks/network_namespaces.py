"""Hosts in network namespaces: one switch, and a link of limited rate to each host, in both directions.

Nothing of it is in the machine's own network: the switch is a bridge in a namespace, too. Packets wait in a token
bucket (``tbf``) at the host's end for the way up, and at the switch's end for the way down, as they wait in a network
card and in a switch. Many kernels are without ``netem``, so packets are lost to a classic BPF program that draws a
number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_NAMESPACES: Final = Path("/run/netns")
_PREFIX: Final = "ft-bench"
_OURS: Final = re.compile(rf"{_PREFIX}-(\d+)-(?:switch|\d+)")
_INTERFACE: Final = "eth0"
_BURST_BYTES: Final = 256 << 10
"""What a bucket lets through at once: several of the 64 KiB that the kernel hands on as one packet."""
_UP_QUEUE_BYTES: Final = 8 << 20
"""A host's own queue. The kernel holds a sender back before it is full."""
_DOWN_QUEUE_BYTES: Final = 2 << 20
"""A switch's queue for a port; what comes when it is full is lost."""
_DROP: Final = "4,32 0 0 4294963256,37 0 1 {threshold},6 0 0 0,6 0 0 2"
"""Four instructions: load a random number, pass the packet if it is above the threshold, else drop it."""
_SENT_FIELD: Final = 8
"""Of a line of /proc/net/dev, behind the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's cable, in bits per second, headers of packets included.

    Attributes:
        up: Towards the switch.
        down: From the switch.
        loss: The share of packets that is lost, each way. Then packets are as small as on a real wire (1514 bytes).
    """

    up: float
    down: float
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface."""

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs a program there."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has passed a host's interface, in bytes; headers of the packets that the kernel put together count once."""

    sent_bytes: int
    received_bytes: int

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


class Network:
    """Hosts at one switch. Made by `network`, which also removes it."""

    def __init__(self, hosts: Sequence[Host], stack: contextlib.ExitStack) -> None:
        self.hosts = tuple(hosts)
        self._counters: dict[Host, int] = {}
        for host in hosts:
            descriptor = _in_namespace(host.namespace, partial(os.open, "/proc/thread-self/net/dev", os.O_RDONLY))
            stack.callback(os.close, descriptor)
            self._counters[host] = descriptor

    def set_link(self, host: Host, link: Link) -> None:
        """Gives a host another cable."""
        number, switch = self.hosts.index(host), _switch()
        port = _port(number)
        is_lossy = link.loss > 0
        segments = f"gso_max_segs {1 if is_lossy else 65535}"
        _ip(f"link set {_INTERFACE} {segments}", host.namespace)
        _ip(f"link set {port} {segments}", switch)
        for namespace, interface, rate, queue in (
            (host.namespace, _INTERFACE, link.up, _UP_QUEUE_BYTES),
            (switch, port, link.down, _DOWN_QUEUE_BYTES),
        ):
            limits = f"rate {rate:.0f}bit burst {_BURST_BYTES} limit {queue}"
            _tc(f"qdisc replace dev {interface} root tbf {limits}", namespace)
            with contextlib.suppress(NetworkError):
                _tc(f"qdisc del dev {interface} clsact", namespace)
            if is_lossy:
                # Where packets come in: what is lost on the way out is noticed by the sender's own kernel.
                _tc(f"qdisc add dev {interface} clsact", namespace)
                program = _DROP.format(threshold=round(link.loss * (1 << 32)))
                _run(["tc", "-n", namespace, *f"filter add dev {interface} ingress bpf da bytecode".split(), program])

    def traffic(self, host: Host) -> Traffic:
        """What has passed the host's interface so far."""
        for line in os.pread(self._counters[host], 1 << 16, 0).decode().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == _INTERFACE:
                fields = rest.split()
                return Traffic(int(fields[_SENT_FIELD]), int(fields[0]))
        raise NetworkError(f"expected the interface {_INTERFACE} in {host.namespace}, it has none")


class NetworkError(RuntimeError):
    """The kernel, or a tool, did not do what a network needs."""


@contextlib.contextmanager
def network(links: Sequence[Link]) -> Iterator[Network]:
    """Makes hosts with these cables, which nothing outlives: not an error, and no later run if this one is killed.

    Raises:
        NetworkError: It cannot be made here.
    """
    reason = why_not()
    if reason is not None:
        raise NetworkError(reason)
    clear_left_behind()
    switch = _switch()
    hosts = [Host(f"{_PREFIX}-{os.getpid()}-{number}", _address(number)) for number in range(len(links))]
    with contextlib.ExitStack() as stack:
        stack.callback(_delete_namespaces, [switch, *(host.namespace for host in hosts)])
        _make_namespace(switch)
        _ip("link add switch type bridge", switch)
        _ip("link set switch up", switch)
        for number, host in enumerate(hosts):
            _make_namespace(host.namespace)
            port = _port(number)
            _ip(f"link add {port} type veth peer name {_INTERFACE} netns {host.namespace}", switch)
            _ip(f"link set {port} master switch up", switch)
            _ip(f"address add {host.address}/16 dev {_INTERFACE}", host.namespace)
            _ip(f"link set {_INTERFACE} up", host.namespace)
        made = stack.enter_context(contextlib.ExitStack())
        result = Network(hosts, made)
        for host, link in zip(hosts, links, strict=True):
            result.set_link(host, link)
        yield result


def why_not() -> str | None:
    """Why no network can be made here, or ``None``."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"expected the tools of iproute2, {' and '.join(missing)} is missing"
    if os.geteuid() != 0:
        return "expected to be root, for only root makes network namespaces"
    probe = f"{_PREFIX}-{os.getpid()}-switch"
    try:
        _run(["ip", "netns", "add", probe])
        _tc("qdisc add dev lo root tbf rate 1mbit burst 4096 limit 4096", probe)
    except NetworkError as error:
        return str(error)
    finally:
        _delete_namespaces([probe])
    return None


def clear_left_behind() -> None:
    """Removes the namespaces of benchmarks that were killed; those of others that still run stay."""
    if not _NAMESPACES.is_dir():
        return
    for entry in _NAMESPACES.iterdir():
        found = _OURS.fullmatch(entry.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            _delete_namespaces([entry.name])


def enter(namespace: str) -> None:
    """Moves the calling thread, and all that it starts from now on, into a namespace."""
    with open(_NAMESPACES / namespace, "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {namespace}")


def _in_namespace(namespace: str, function: partial[int]) -> int:
    """Runs a function there, on a thread of its own: a thread that has moved does not come back."""
    results: list[int] = []

    def run() -> None:
        enter(namespace)
        results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not results:
        raise NetworkError(f"expected to enter {namespace}")
    return results[0]


def _switch() -> str:
    return f"{_PREFIX}-{os.getpid()}-switch"


def _port(number: int) -> str:
    return f"port{number}"


def _address(number: int) -> str:
    return f"10.77.{number // 250}.{number % 250 + 1}"


def _make_namespace(name: str) -> None:
    _run(["ip", "netns", "add", name])
    _ip("link set lo up", name)


def _delete_namespaces(names: Sequence[str]) -> None:
    for name in names:
        if (_NAMESPACES / name).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(arguments: str, namespace: str) -> None:
    _run(["ip", "-n", namespace, *arguments.split()])


def _tc(arguments: str, namespace: str) -> None:
    _run(["tc", "-n", namespace, *arguments.split()])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
