"""``ft-transport doctor``: checks this host and the network to its peers. ``status``: shows what peers serve."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import typer

from ft_transport.cli.keepers import find_keepers
from ft_transport.cli.output import escape, megabytes, message_of, remedy_for
from ft_transport.credentials import TOKEN_VARIABLE
from ft_transport.errors import ConfigurationError, TransportError
from ft_transport.http.bind_address import ADVERTISE_VARIABLE, addresses_of, advertised_host, interfaces
from ft_transport.http.client.peer_status import Connect, PeerStatus, ProbedRate, ask_status, connecting, probe_rates
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.settings import TransportSettings
from ft_transport.telemetry.record import now_unix_s
from manager.config import LIGHTHOUSE_ENV, ManagerConfig
from manager.errors import QuorumError
from manager.quorum.members import read_status

Verdict: TypeAlias = Literal["ok", "warn", "bad"]

_LEAST_FILES: Final = 4096
_SLOW_LOOKUP_S: Final = 0.5
_MAX_CLOCK_OFFSET_S: Final = 2.0
_LEAST_FREE: Final = 0.1
"""Fraction of the host's memory that should be free, because a replica copies its state to serve it."""
_MUCH_SLOWER: Final = 3.0
_ANSWERING: Final = timedelta(seconds=3)
_LOOK_AGAIN_S: Final = 0.05
_MARKS: Final = {"ok": "✓", "warn": "!", "bad": "✗"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check.
        verdict: ``bad`` if the finding breaks or slows recovery, ``warn`` if the finding may do so, otherwise ``ok``.
        found: Description of the finding.
        remedy: How to fix the fault; empty without a fault.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def doctor_command(
    peers: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="URLs of replicas (as `metadata()` of their transport returns them)."),
    ] = None,
    seconds_each: Annotated[float, typer.Option(help="Seconds to measure each path to a peer.", min=0.1)] = 1.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Check this host and the network to its peers. Print each fault, and which setting fixes it.

    A short fetch over one connection, of at most 256 MiB, measures the rate of each network path. The job token and
    certificates come from the environment. Exits with 1 if a check finds a fault that breaks or slows recovery.
    """
    settings = TransportSettings()
    connect = connecting(settings.keys(), settings.certificates())
    checks: list[Check] = []
    for check in chain(check_host(), *(check_peer(url, connect, seconds_each=seconds_each) for url in peers or ())):
        checks.append(check)
        if not as_json:
            typer.echo(f"{_MARKS[check.verdict]} {check.name}: {check.found}")
            if check.remedy:
                typer.echo(f"    → {check.remedy}")
    if as_json:
        typer.echo(msgspec.json.encode(checks))
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(1)


def status_command(
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL", help="URLs of replicas (as `metadata()` of their transport returns them)."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Show what each replica serves: step, size, and number of current receivers.

    The command asks all replicas at once, and waits at most 3 s. The job token and certificates come from the
    environment. Exits with 1 if a replica does not respond, with 2 if an argument is not a URL.
    """
    settings = TransportSettings()
    connect = connecting(settings.keys(), settings.certificates())
    with SafeExecutor(min(32, len(urls)), "ft-transport-ask") as pool:
        answers = list(pool.map(lambda url: _ask(url, connect), urls))
    if as_json:
        results = [_as_object(url, answer) for url, answer in zip(urls, answers, strict=True)]
        typer.echo(msgspec.json.encode(results))
    else:
        for url, answer in zip(urls, answers, strict=True):
            typer.echo(_as_line(url, answer))
    if any(isinstance(answer, ConfigurationError) for answer in answers):
        raise typer.Exit(2)
    if any(isinstance(answer, TransportError) for answer in answers):
        raise typer.Exit(1)


def _ask(url: str, connect: Connect) -> PeerStatus | TransportError:
    try:
        return ask_status(PeerAddress.from_url(url), connect, within_s=3.0)
    except TransportError as error:
        return error


def _as_object(url: str, answer: PeerStatus | TransportError) -> dict[str, Any]:
    if isinstance(answer, TransportError):
        return {"url": url, "error": f"{type(answer).__name__}: {answer}", "remedy": remedy_for(answer)}
    return {"url": url, **msgspec.to_builtins(answer)}


def _as_line(url: str, answer: PeerStatus | TransportError) -> str:
    if isinstance(answer, TransportError):
        remedy = remedy_for(answer)
        return f"✗ {url}  {message_of(answer)}" + (f"\n    → {remedy}" if remedy else "")
    replica = escape(answer.replica, 40)
    if answer.step is None:
        return f"✓ {url}  {replica}: has no snapshot now; it takes one when a peer recovers"
    return f"✓ {url}  {replica}: step {answer.step}, {megabytes(answer.snapshot_bytes)}, {answer.clients} receive it"


def check_host() -> Iterator[Check]:
    """Check this host: versions, memory, limits, network interfaces, GPU."""
    yield _versions()
    yield _memory_file()
    yield _free_memory()
    yield _keepers()
    yield _open_files()
    yield _ipv6()
    yield _advertised()
    yield _gpu()
    if address := os.environ.get(LIGHTHOUSE_ENV):
        yield _lighthouse(address)


def check_peer(url: str, connect: Connect, *, seconds_each: float) -> Iterator[Check]:
    """Check one peer: its host name, its response, its clock, and the rate over each network path."""
    peer = PeerAddress.from_url(url)
    yield _resolver(peer)
    asked = now_unix_s()
    try:
        status = ask_status(peer, connect, within_s=3.0)
    except TransportError as error:
        remedy = (
            "is the peer running, does a firewall block its port, and are the job token and the certificate authority "
            "the same on both hosts?"
        )
        yield _check(f"{peer}", f"{type(error).__name__}: {error}", remedy, "bad")
        return
    yield _clock(peer, status, asked, now_unix_s())
    yield from _rates(peer, status, probe_rates(peer, status, connect, seconds_each=seconds_each))


def _check(name: str, found: str, remedy: str = "", verdict: Verdict = "warn") -> Check:
    """Return the result of a check. Without a remedy, the verdict is ``ok``."""
    return Check(name=name, verdict=verdict if remedy else "ok", found=found, remedy=remedy)


def _versions() -> Check:
    torchft = _version("torchft") or _version("torchft-nightly")
    found = [
        f"Python {platform.python_version()}",
        *(_version(name) or f"no {name}" for name in ("ft-transport", "torch", "aiohttp")),
        torchft or "no torchft",
    ]
    remedy = "a quorum needs torchft: pip install 'ft-transport[torchft]', on Linux x86-64 with Python 3.10 to 3.13"
    return _check("versions", ", ".join(found), "" if torchft else remedy)


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_file() -> Check:
    try:
        os.close(os.memfd_create("ft-transport-doctor"))
    except (OSError, AttributeError) as error:
        remedy = "Linux with memfd_create(2) is needed; a container's seccomp profile may forbid it"
        return _check("memory file", str(error), remedy, "bad")
    return _check("memory file", "memfd_create works")


def _free_memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        return _check("memory", str(error), "mount /proc")
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    total, free = fields["MemTotal"], fields["MemAvailable"]
    remedy = "each snapshot is as large as the state; Limits.max_snapshots=1 allows only one"
    is_enough = free >= _LEAST_FREE * total
    return _check("memory", f"{megabytes(free)} of {megabytes(total)} are free", "" if is_enough else remedy)


def _keepers() -> Check:
    """Check whether keepers hold much memory for processes that are dead."""
    keepers = find_keepers()
    orphans = [keeper for keeper in keepers if not keeper.is_trainer_alive]
    held_bytes = sum(keeper.held_bytes for keeper in orphans)
    found = f"{len(keepers)} run, of which {len(orphans)} hold {megabytes(held_bytes)} for dead processes"
    remedy = "`ft-transport keepers --end` drops it, if these jobs do not start again"
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _check("keepers", found, remedy if held_bytes > _LEAST_FREE * total_bytes else "")


def _lighthouse(address: str) -> Check:
    """Check how long a Lighthouse waits for a silent replica, by a few heartbeats of a replica that does not exist."""
    from manager.quorum.lighthouse import LighthouseSession

    probe, config = f"ft-transport-doctor:{uuid.uuid4()}", ManagerConfig()
    try:
        session = LighthouseSession(
            address,
            probe,
            connect_timeout=_ANSWERING,
            heartbeat_interval=config.heartbeat_interval,
            heartbeat_timeout=config.heartbeat_timeout,
            keys=None,
            min_replicas=1,
            stand_in=None,
        )
    except (QuorumError, ValueError) as error:
        return _check(
            "lighthouse", f"{error}", f"is a Lighthouse running there? {LIGHTHOUSE_ENV} has its address", "bad"
        )
    until_s = time.monotonic() + _ANSWERING.total_seconds()
    while not ((page := read_status(address)) and probe in page.alive) and time.monotonic() < until_s:
        time.sleep(_LOOK_AGAIN_S)
    session.close()
    silent_s, expected_s = time.monotonic(), config.heartbeat_timeout.total_seconds()
    while (waited_s := time.monotonic() - silent_s) < 2 * expected_s:
        if (page := read_status(address)) and probe in dict(page.silent):
            return _check("lighthouse", f"{address} declares a silent replica dead after {waited_s:.1f} s")
        time.sleep(_LOOK_AGAIN_S)
    remedy = (
        f"start torchft_lighthouse with --heartbeat_timeout_ms {expected_s * 1e3:.0f}: when a host dies, the other "
        "replicas wait that long; or set heartbeat_timeout of every Manager to the Lighthouse's value"
    )
    return _check("lighthouse", f"{address} counts a replica as alive that was silent for {waited_s:.1f} s", remedy)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {_LEAST_FILES}: connections of peers and the trainer's files share this limit"
    is_enough = soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES
    return _check("open files", f"the limit is {soft}, and may be raised to {hard}", "" if is_enough else remedy)


def _ipv6() -> Check:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return _check("IPv6", f"not available ({error.strerror}); IPv4 is used")
    return _check("IPv6", "available")


def _advertised() -> Check:
    settings = TransportSettings()
    is_guarded = settings.keys() is not None or settings.certificates() is not None or settings.allow_anyone
    return _advertised_to_peers() if is_guarded else _advertised_on_the_loopback()


def _advertised_on_the_loopback() -> Check:
    """Check the advertised address of a job without token and certificates. Its servers listen only on the loopback."""
    remedy = f"set {TOKEN_VARIABLE} on all hosts of the job, so that they can reach each other"
    chosen = os.environ.get(ADVERTISE_VARIABLE, "")
    try:
        is_local = not chosen or all(each.is_loopback for each in addresses_of(advertised_host(None).strip("[]")))
    except TransportError as error:
        return _check("advertised", str(error), f"correct {ADVERTISE_VARIABLE}", "bad")
    if is_local:
        found = "without a job token, servers on this host listen on the loopback alone: other hosts cannot reach them"
        return _check("advertised", found, remedy)
    found = (
        f"{ADVERTISE_VARIABLE} is {chosen}, but without a job token a server listens on the loopback alone, and cannot "
        "start with this address"
    )
    return _check("advertised", found, remedy, "bad")


def _advertised_to_peers() -> Check:
    remedy = f"set {ADVERTISE_VARIABLE} (TransportSettings.advertise) to the interface or address of the fast network"
    began_s = time.monotonic()
    try:
        host = advertised_host(None)
    except TransportError as error:
        return _check("advertised", str(error), remedy, "bad")
    addresses = addresses_of(host.strip("[]"))
    took_s = time.monotonic() - began_s
    by_address = interfaces()
    unknown = "no interface of this host"
    ways = [f"{each} ({by_address.get(each) or ('lo' if each.is_loopback else unknown)})" for each in addresses]
    reached = (each for each in by_address.items() if not (each[0].is_loopback or each[0].is_link_local))
    others = sorted(f"{name} {address}" for address, name in reached)
    found = (
        f"this host advertises {host}: {', '.join(ways) or 'unknown'}; its interfaces are "
        f"{', '.join(others) or 'the loopback only'}"
    )
    if all(each.is_loopback for each in addresses) and others:
        return _check("advertised", f"{found}; peers on other hosts would connect to themselves", remedy, "bad")
    if took_s > _SLOW_LOOKUP_S:
        return _check("advertised", f"{found}; resolving the name took {took_s:.1f} s", remedy)
    if len(others) > 1 and not os.environ.get(ADVERTISE_VARIABLE):
        return _check("advertised", f"{found}; no setting selects the fast interface", remedy)
    return _check("advertised", found)


def _gpu() -> Check:
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return _check("GPU", ", ".join(devices) or "none; states are copied from host memory")


def _resolver(peer: PeerAddress) -> Check:
    began_s = time.monotonic()
    addresses = addresses_of(peer.host)
    took_s = time.monotonic() - began_s
    shown = ", ".join(map(str, addresses)) or "no address"
    found = f"{peer.host} resolves to {shown}, in {took_s * 1e3:.0f} ms"
    name, remedy = f"{peer}: name", f"on that host, set {ADVERTISE_VARIABLE} to an address"
    if not addresses:
        return _check(name, found, remedy, "bad")
    return _check(name, found, remedy if took_s > _SLOW_LOOKUP_S else "")


def _clock(peer: PeerAddress, status: PeerStatus, asked: float, answered: float) -> Check:
    name = f"{peer}: clock"
    if not status.unix_s:
        return _check(name, "unknown")
    # The peer reports whole seconds (RFC 9110, section 6.6.1): add half a second of uncertainty.
    offset_s = status.unix_s + 0.5 - (asked + answered) / 2
    unknown_s = 0.5 + (answered - asked) / 2
    is_close = abs(offset_s) <= _MAX_CLOCK_OFFSET_S + unknown_s
    remedy = "" if is_close else "run NTP, so that logs and traces of both hosts have matching times"
    found = "equal to this host's clock" if abs(offset_s) <= unknown_s else f"{offset_s:+.1f} s from this host's clock"
    found = f"{found}, ± {unknown_s:.1f} s"
    return _check(name, found, remedy)


def _rates(peer: PeerAddress, status: PeerStatus, rates: list[ProbedRate]) -> Iterator[Check]:
    as_named, best = rates[0], max(rates, key=lambda rate: rate.bytes_per_s)
    replica = escape(status.replica, 64)
    for rate in rates:
        name = f"{peer}: rate over {rate.interface or '?'}"
        way = f"{rate.local_address} → {rate.peer}" + (f" ({rate.peer_interface} there)" if rate.peer_interface else "")
        if rate.error:
            verdict: Verdict = "ok"  # Only the advertised address must be reachable.
            if rate is as_named:
                verdict = "warn" if status.step is None else "bad"
            yield Check(name=name, verdict=verdict, found=f"{way}: {escape(rate.error, 300)}")
            continue
        label = " (the advertised address)" if rate is as_named else ""
        found = f"{megabytes(rate.bytes_per_s)}/s {way}{label}; {megabytes(rate.num_bytes)} were fetched"
        if rate is as_named and best.bytes_per_s > _MUCH_SLOWER * rate.bytes_per_s:
            times = best.bytes_per_s / rate.bytes_per_s
            yield _check(
                name,
                f"{found}; over {best.interface} {megabytes(best.bytes_per_s)}/s, {times:.0f} times as fast",
                f"on {replica or peer} set {ADVERTISE_VARIABLE}={best.peer_interface or best.peer.host} "
                "(TransportSettings.advertise)",
                "bad",
            )
        else:
            yield _check(name, found)
