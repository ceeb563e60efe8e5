"""``ft-transport explain``: shows why a recovery was slow, and what helps. ``trace``: converts records to a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from ft_transport.cli.contents import NotFoundError
from ft_transport.cli.output import escape, megabytes
from ft_transport.errors import RecordError
from ft_transport.runtime.regular_files import read_regular
from ft_transport.telemetry.record import KINDS, Record, Retry, Transfer, decode_record, encode_trace

_INTERFACES: Final = Path("/sys/class/net")
_shown: Final = partial(escape, max_characters=600)
_DOMINANT: Final = 0.25
"""A phase is reported if it took at least this fraction of the whole time."""
_MUCH_SLOWER: Final = 3.0
"""A network path is reported if another path is more than this many times as fast."""
_LEAST_BYTES: Final = 1 << 20
"""Least size of a transfer whose rate is meaningful."""
_NEAR_THE_LINK: Final = 0.7
"""The link limits a transfer that reaches at least this fraction of the link's speed."""
_LEAST_WAIT_S: Final = 1.0
"""A shorter wait for a quorum is normal."""
_LONG_WAIT: Final = 0.5
"""A wait for a quorum that took a smaller fraction of the whole time is normal, too."""
_LOOPBACK: Final = "lo"

_PHASES: Final[Mapping[str, tuple[str, str]]] = {
    "quorum": (
        "waiting until the Lighthouse formed a quorum",
        "the Lighthouse waits for a replica that hangs or has died until its heartbeat or join timeout: find the "
        "missing replica with `ft-transport top LIGHTHOUSE`, or shorten heartbeat_timeout_ms and join_timeout_ms",
    ),
    "rendezvous": (
        "making the process group with the other replicas, and agreeing with the other ranks",
        "compare this phase in the records of the other replicas; ManagerConfig.timeout and connect_timeout limit it",
    ),
    "lock": (
        "waiting for the lock over this replica's own state",
        "another thread of this replica reads or writes the state for long: a save, or a section of reading() or "
        "writing()",
    ),
    "manifest": (
        "reaching the source, and waiting until it had a snapshot to serve",
        "the source takes a snapshot at its next step boundary: its step is long, or it waited for memory "
        "(Limits.max_snapshots); if the source was unreachable, see the retries",
    ),
    "plan": (
        "comparing the state of this replica with the source's digests",
        'known="into" digests the whole state; omit it if most of the state changes',
    ),
    "verify": ("comparing digests that arrived after the data", "the limit is the memory bandwidth"),
    "load": (
        "calling the registered load functions",
        "find out which registered load function is slow",
    ),
    "compare": (
        "comparing the loaded state with the sent state",
        "ManagerConfig(verify_heal=False) skips it, but then a load function may change the state undetected",
    ),
    "follow": (
        "receiving the state and making the recorded steps, while all replicas trained on",
        "no replica waited; a faster network or fewer steps per second (replay takes part of a core) shorten it",
    ),
    "first_step": (
        "the first step after the heal, until it was committed",
        "this is training time: compilation, data loading, or a slow first step, which a forward and backward before "
        "the first start_quorum() warms up; on CPUs also page faults, which GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "
        "reduces",
    ),
}
_RETRIES: Final[Mapping[str, str]] = {
    "PeerUnreachableError": "is the peer running, does its host name resolve to it, and does a firewall block its "
    "port? `ft-transport doctor URL` checks this",
    "PeerSilentError": "is the peer's process stopped, or is its host or the network overloaded? "
    "Limits.stall_timeout and min_bytes_per_s limit the wait",
    "PeerAuthenticationError": "set the same FT_TRANSPORT_TOKEN on both hosts; behind address translation, set "
    "TransportSettings.reached_at",
    "IntegrityError": "bytes were damaged in the network or in memory; look at the hosts' ECC and network counters",
    "PeerNotReadyError": "the source had no snapshot of that step yet",
    "SnapshotReplacedError": "the source took a newer snapshot during the transfer; raise its Limits.max_snapshots",
    "UnknownHostError": "the name does not resolve here; set FT_TRANSPORT_ADVERTISE at the source to an address",
}
_ADVERTISE: Final = (
    "at the source, set FT_TRANSPORT_ADVERTISE (TransportSettings.advertise) to its interface or address in the "
    "network of {interface}"
)


def explain_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files of records (FT_TRANSPORT_RECORDS), preferably of all replicas."),
    ],
    last: Annotated[int, typer.Option(help="Number of records to explain, from the end.", min=1)] = 1,
    kind: Annotated[str, typer.Option(help=f"Explain only records of one kind: {', '.join(KINDS)}.")] = "",
    slowest: Annotated[bool, typer.Option("--slowest", help="Explain the slowest records, not the last.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each record.")] = False,
) -> None:
    """Show in which phases a recovery, save, load or publish spent its time, and which setting shortens them.

    The command warns of missing files and reads the others. Exits with 0 if all explained operations succeeded, with 1
    if one of them failed or no record was found, with 2 if all files are missing.
    """
    if kind and kind not in KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(KINDS)} as --kind, got {kind!r}")
    records = read_records(files)
    chosen = [record for record in records if not kind or record.kind == kind]
    if slowest:
        chosen.sort(key=lambda record: record.length_s)
    chosen = chosen[-last:]
    if not chosen:
        wanted = f"a record of kind {kind}" if kind else "a record"
        typer.echo(f"expected {wanted} in {', '.join(map(str, files))}, got none", err=True)
        raise typer.Exit(1)
    links = link_speeds()
    for number, record in enumerate(chosen):
        findings = explain(record, others=[each for each in records if each is not record], link_bits_per_s=links)
        if as_json:
            typer.echo(msgspec.json.encode(_as_object(record, findings)))
        else:
            typer.echo(("\n" if number else "") + _as_text(record, findings))
    if any(record.outcome != "ok" for record in chosen):
        raise typer.Exit(1)


def trace_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files of records (FT_TRANSPORT_RECORDS), of any replicas.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the trace; an existing file is replaced.")
    ] = Path("trace.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the file and the number of records as JSON.")] = False,
) -> None:
    """Write a trace for https://ui.perfetto.dev, with a process for each replica and a track for each rank.

    The command warns of missing files and reads the others. Exits with 1 if no record was found, with 2 if all files
    are missing or the trace cannot be written.
    """
    records = read_records(files)
    if not records:
        typer.echo(f"expected a record in {', '.join(map(str, files))}, got none; nothing was written", err=True)
        raise typer.Exit(1)
    try:
        output.write_bytes(encode_trace(records))
    except OSError as error:
        typer.echo(f"expected to write the trace to {output}: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(msgspec.json.encode({"file": str(output), "num_records": len(records)}))
    else:
        typer.echo(f"{output}: {len(records)} records")


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records of all files, the oldest first. Print a warning for each unreadable file.

    Args:
        paths: The files. Some may be missing: a replica that never recovered has no file.

    Raises:
        NotFoundError: No file is readable.
        RecordError: A line is not a record. An incomplete last line is ignored if the file has other records: the
            process may have been killed while it wrote the line.
    """
    records, missing = list[Record](), list[str]()
    for path in paths:
        try:
            content = read_regular(path, max_bytes=256 << 20)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            missing.append(f"expected a file of records at {path}: {getattr(error, 'strerror', None) or error}")
        else:
            records += _decode(path, content)
    if len(missing) == len(paths):
        raise NotFoundError(f"{'; '.join(missing)}; replicas write records to the file that FT_TRANSPORT_RECORDS names")
    for each in missing:
        typer.echo(f"! {escape(each, 600)}", err=True)
    return sorted(records, key=lambda record: record.begun_unix_s)


def _decode(path: Path, content: bytes) -> list[Record]:
    records = list[Record]()
    *lines, unended = content.split(b"\n")
    for number, line in enumerate([*lines, unended] if unended else lines, 1):
        try:
            records.append(decode_record(line))
        except RecordError as error:
            if records and number > len(lines):
                break
            raise RecordError(f"{path}, line {number}: {error}") from error
    return records


def link_speeds() -> dict[str, float]:
    """Return the nominal speeds of this host's interfaces in bits per second, as sysfs reports them (Linux)."""
    speeds = {}
    for interface in _INTERFACES.iterdir() if _INTERFACES.is_dir() else ():
        try:
            megabits = int((interface / "speed").read_text())
        except (OSError, ValueError):  # The interface is down, or virtual.
            continue
        if megabits > 0:
            speeds[interface.name] = megabits * 1e6
    return speeds


def _as_object(record: Record, findings: tuple[Finding, ...]) -> dict[str, Any]:
    return {
        "summary": summary_of(record),
        "phases": record.phase_lengths(),
        "findings": msgspec.to_builtins(findings),
        "record": msgspec.to_builtins(record),
    }


def _as_text(record: Record, findings: tuple[Finding, ...]) -> str:
    lines = [
        _shown(summary_of(record)),
        f"began {_date(record.begun_unix_s)}, rank {record.group_rank}",
        "",
    ]
    for name, length_s in record.phase_lengths().items():
        # A damaged or foreign record may have a phase that is longer than the whole.
        share = min(1.0, max(0.0, length_s / record.length_s)) if record.length_s else 0.0
        lines.append(f"  {_shown(name):<11} {_seconds(length_s)} {100 * share:4.0f} %  {'█' * round(40 * share)}")
    for finding in findings:
        lines += ["", f"• {_shown(finding.text)}"]
        if finding.remedy:
            lines.append(f"  → {_shown(finding.remedy)}")
    for name, note in record.notes.items():
        lines += ["", f"{_shown(name)}: {_shown(note)}"]
    return "\n".join(lines)


def _date(unix_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):  # a year outside the platform's range
        return f"{unix_s:g} s after 1970"


def _seconds(length_s: float) -> str:
    return f"{length_s:9.3f} s" if abs(length_s) < 1e9 else f"{length_s:9.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason why an operation took its time, or failed.

    Attributes:
        text: The reason, with figures.
        remedy: Advice on what to change; empty if nothing needs to be done.
        cost_s: The time that the reason cost, in seconds.
    """

    text: str
    remedy: str = ""
    cost_s: float = 0.0


def explain(
    record: Record, *, others: Sequence[Record] = (), link_bits_per_s: Mapping[str, float] | None = None
) -> tuple[Finding, ...]:
    """Return the reasons why an operation took its time or failed, those that cost most time first.

    Args:
        record: The record of the operation.
        others: Other records of the same job, to compare the rates of different network paths.
        link_bits_per_s: The nominal speed of this host's interfaces, by name.
    """
    findings = [
        *_of_phases(record),
        *_of_transfers(record, others, link_bits_per_s or {}),
        *_of_retries(record),
    ]
    if record.outcome != "ok":
        why = record.error or "another operation replaced it"
        findings.insert(0, Finding(text=f"{record.kind} {record.outcome}: {why}", cost_s=record.length_s))
    return tuple(sorted(findings, key=lambda each: -each.cost_s))


def summary_of(record: Record) -> str:
    """Return one line about a record: kind, replica, step, outcome, length and size."""
    who = f" of {record.replica}" if record.replica else ""
    at = f" at step {record.step}" if record.step is not None else ""
    size = f", {megabytes(record.num_bytes)}" if record.num_bytes else ""
    return f"{record.kind}{who}{at}: {record.outcome} in {record.length_s:.2f} s{size}"


def _of_phases(record: Record) -> list[Finding]:
    found = []
    for name, length_s in record.phase_lengths().items():
        if record.length_s and name != "transfer" and length_s >= _DOMINANT * record.length_s:
            about, remedy = _PHASES.get(name, ("", ""))
            if name == "quorum" and length_s < max(_LEAST_WAIT_S, _LONG_WAIT * record.length_s):
                # The wait until the other replicas reach their step boundary is normal.
                remedy = ""
            text = f"{name} took {_part_of(length_s, record)}" + (f": {about}" if about else "")
            found.append(Finding(text=text, remedy=remedy, cost_s=length_s))
    return found


def _of_transfers(record: Record, others: Sequence[Record], links: Mapping[str, float]) -> list[Finding]:
    length_s = record.phase_lengths().get("transfer", 0.0)
    if not record.transfers or not record.length_s or length_s < _DOMINANT * record.length_s:
        return []
    known = [
        transfer for each in (record, *others) for transfer in each.transfers if transfer.num_bytes >= _LEAST_BYTES
    ]
    text = f"transfer took {_part_of(length_s, record)}: " + "; ".join(map(_described, record.transfers))
    slow = [
        _of_slow_way(transfer, known, links)
        for transfer in record.transfers
        if transfer.num_bytes >= _LEAST_BYTES and transfer.interface
    ]
    return [Finding(text=text, cost_s=length_s), *(finding for finding in slow if finding is not None)]


def _of_slow_way(transfer: Transfer, known: Sequence[Transfer], links: Mapping[str, float]) -> Finding | None:
    """Return a finding if another network path, source or link is much faster than the one that the transfer used."""
    own, rate = transfer.interface, transfer.bytes_per_s
    ways = [each for each in known if each.interface not in ("", own, _LOOPBACK)]
    best = max(ways, key=lambda each: each.bytes_per_s, default=None)
    same = max((each for each in known if each.interface == own), key=lambda each: each.bytes_per_s)
    link = links.get(own, 0.0)
    faster, name = max(
        ((speed, name) for name, speed in links.items() if name not in (own, _LOOPBACK)), default=(0.0, "")
    )
    if not rate:
        return None
    if best is not None and best.bytes_per_s > _MUCH_SLOWER * rate:
        times = best.bytes_per_s / rate
        text = (
            f"{transfer.peer} was reached over {own} ({transfer.local_address} → {transfer.peer_address}) at "
            f"{megabytes(rate)}/s; over {best.interface} ({best.local_address} → {best.peer_address}) a transfer was "
            f"{times:.0f} times as fast, {megabytes(best.bytes_per_s)}/s"
        )
        remedy = _ADVERTISE.format(interface=best.interface)
    elif same.bytes_per_s > _MUCH_SLOWER * rate:
        times = same.bytes_per_s / rate
        text = (
            f"{transfer.peer} sent {megabytes(rate)}/s over {own}; {same.peer} sent {megabytes(same.bytes_per_s)}/s "
            "over the same interface"
        )
        remedy = f"look at the link, the load and Limits.max_send_bytes_per_s of {transfer.peer}"
    elif link and rate >= _NEAR_THE_LINK * link / 8 and faster > _MUCH_SLOWER * link:
        times = faster / link
        text = f"{own} is a link of {link / 1e6:.0f} Mbit/s, which was the limit; {name} has {faster / 1e6:.0f} Mbit/s"
        remedy = _ADVERTISE.format(interface=name)
    else:
        return None
    return Finding(text=text, remedy=remedy, cost_s=transfer.length_s * (1 - 1 / times))


def _of_retries(record: Record) -> list[Finding]:
    alike: dict[tuple[str, str], list[Retry]] = {}
    for retry in record.retries:
        alike.setdefault((retry.cause.partition(":")[0], retry.peer), []).append(retry)
    found = []
    for (kind, peer), retries in alike.items():
        first, last = retries[0], retries[-1]
        times = (
            f"{len(retries)} times, {first.at_s:.1f} to {last.at_s:.1f}" if len(retries) > 1 else f"{first.at_s:.1f}"
        )
        text = f"retried{f' with {peer}' if peer else ''} {times} s after the beginning: {last.cause}"
        found.append(Finding(text=text, remedy=_RETRIES.get(kind, ""), cost_s=last.at_s - first.at_s))
    return found


def _described(transfer: Transfer) -> str:
    way = (
        f" over {transfer.interface} ({transfer.local_address} → {transfer.peer_address})" if transfer.interface else ""
    )
    role = "" if transfer.role == "source" else f" ({transfer.role.replace('_', ' ')})"
    return f"{megabytes(transfer.num_bytes)} from {transfer.peer}{role}{way} at {megabytes(transfer.bytes_per_s)}/s"


def _part_of(length_s: float, record: Record) -> str:
    return f"{length_s:.2f} s of {record.length_s:.2f} s ({100 * length_s / record.length_s:.0f} %)"
