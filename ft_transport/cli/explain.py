"""``ft-transport explain``: why was that recovery slow, and which setting helps? ``trace``: records as a trace."""

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
"""Minimum fraction of the whole for a phase to be examined."""
_MUCH_SLOWER: Final = 3.0
"""Minimum factor between two ways for the slower one to be named."""
_LEAST_BYTES: Final = 1 << 20
"""Minimum bytes for a rate to be meaningful."""
_NEAR_THE_LINK: Final = 0.7
"""Fraction of a link's speed from which a transfer is as fast as the link allows."""
_LEAST_WAIT_S: Final = 1.0
_MUCH_OF_IT: Final = 0.5
"""Shorter waits for a quorum, or smaller fractions of the whole, are not due to a missing replica."""
_LOOPBACK: Final = "lo"

_PHASES: Final[Mapping[str, tuple[str, str]]] = {
    "quorum": (
        "waiting until the Lighthouse formed a quorum",
        "a replica that hangs or has died is waited for until the Lighthouse's heartbeat or join timeout: see which "
        "one is missing (`ft-transport top LIGHTHOUSE`), or shorten heartbeat_timeout_ms and join_timeout_ms",
    ),
    "rendezvous": (
        "making the process group with the other replicas, and agreeing with the other ranks",
        "look at how long the others took; ManagerConfig.timeout and connect_timeout bound it",
    ),
    "lock": (
        "waiting for the lock over this replica's own state",
        "something here reads or writes the state for long: a save's clone, or a section of read_lock()",
    ),
    "manifest": (
        "reaching the source, and waiting until it had a snapshot to serve",
        "a source takes a snapshot at its next step boundary: its step is long, or it waited for memory "
        "(Limits.max_snapshots); if it was not reached, see the retries",
    ),
    "plan": (
        "finding out what is here already",
        'known="into" digests all of the state; leave it out where little of it lasts',
    ),
    "verify": ("comparing digests that came after the data", "memory bandwidth"),
    "load": (
        "load functions of what is registered",
        "look at the load functions of what is registered with this replica",
    ),
    "compare": (
        "comparing what is loaded with what was sent",
        "ManagerConfig.verify_heal turns it off, at the price that a load function may change the state unseen",
    ),
    "first_step": (
        "the first step after the heal, until it was committed",
        "this is training: compile, data loading, or the step itself, which a forward and backward before the first "
        "start_quorum() warms up; on CPUs also page faults, which GLIBC_TUNABLES=glibc.malloc.hugetlb=1 makes few",
    ),
}
_RETRIES: Final[Mapping[str, str]] = {
    "PeerUnreachableError": "is it running, does its name lead to it, and does a firewall let its port through? "
    "`ft-transport doctor URL` tells",
    "PeerSilentError": "is its process stopped, or its host or the network between overloaded? "
    "Limits.stall_timeout and min_bytes_per_s say how long it is waited for",
    "PeerAuthenticationError": "both sides need the same FT_TRANSPORT_TOKEN, and each other's addresses "
    "(TransportSettings.reached_at behind a translation)",
    "IntegrityError": "bytes were damaged on their way or in memory; look at the hosts' ECC and network counters",
    "PeerNotReadyError": "the source had no snapshot of that step yet",
    "SnapshotReplacedError": "the source trained on meanwhile; raise Limits.max_snapshots there",
    "UnknownHostError": "the name does not resolve here; set FT_TRANSPORT_ADVERTISE at the source to an address",
}
_ADVERTISE: Final = (
    "at the source set FT_TRANSPORT_ADVERTISE (TransportSettings.advertise) to its interface or address in the network "
    "of {interface}"
)


def explain_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files of records (FT_TRANSPORT_RECORDS); of all replicas, best."),
    ],
    last: Annotated[int, typer.Option(help="Explain the last so many.", min=1)] = 1,
    kind: Annotated[str, typer.Option(help=f"Only those of one kind: {', '.join(KINDS)}.")] = "",
    slowest: Annotated[bool, typer.Option("--slowest", help="The slowest, not the last.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON for each record.")] = False,
) -> None:
    """Say where the time of a recovery, save, load or publish went, and which setting mends it.

    A file that is not there is named, and the others are explained. Exits with 0 if what is explained succeeded, with 1
    if one of them did not, or there is no record, with 2 if none of the files is there.
    """
    if kind and kind not in KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(KINDS)} as --kind, got {kind!r}")
    records = read_records(files)
    chosen = [record for record in records if not kind or record.kind == kind]
    if slowest:
        chosen.sort(key=lambda record: record.length_s)
    chosen = chosen[-last:]
    if not chosen:
        typer.echo(f"expected {kind or 'a record'} in {', '.join(map(str, files))}, there is none", err=True)
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
        Path, typer.Option("--output", "-o", help="Where the trace goes; a file that is there is replaced.")
    ] = Path("trace.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Say in JSON what was written.")] = False,
) -> None:
    """Write a trace that https://ui.perfetto.dev opens: a process for each replica, a line for each rank.

    A file that is not there is named, and the others are read. Exits with 1 if there is no record, with 2 if none of
    the files is there, or the trace cannot be written.
    """
    records = read_records(files)
    if not records:
        typer.echo(f"expected a record in {', '.join(map(str, files))}, there is none; nothing was written", err=True)
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
    """Return the records of all files, the oldest first. Names files that are unreadable while others are readable.

    Args:
        paths: The files. A replica that never recovered has no file.

    Raises:
        NotFoundError: No file is readable.
        RecordError: A line is not a record. An unfinished last line after others is left out: its process may have been
            killed during the write.
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
        raise NotFoundError(f"{'; '.join(missing)}; they are written where FT_TRANSPORT_RECORDS says")
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
    """Return the nominal speeds of this host's interfaces in bits per second, as far as sysfs has them (Linux)."""
    speeds = {}
    for interface in _INTERFACES.iterdir() if _INTERFACES.is_dir() else ():
        try:
            megabits = int((interface / "speed").read_text())
        except (OSError, ValueError):  # it is down, or virtual
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
        # In records of other origin a phase may be longer than the whole.
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
    """One fact that a record shows.

    Attributes:
        text: The fact, with its figures.
        remedy: How to fix it; empty if no fix is needed.
        cost_s: The part of the time that it explains, in seconds; findings are sorted by it.
    """

    text: str
    remedy: str = ""
    cost_s: float = 0.0


def explain(
    record: Record, *, others: Sequence[Record] = (), link_bits_per_s: Mapping[str, float] | None = None
) -> tuple[Finding, ...]:
    """Return what a record shows, the most important finding first.

    Args:
        record: The record of the slow operation.
        others: Records of the same job, to compare with other ways and times.
        link_bits_per_s: The nominal speed of this host's interfaces, by name.
    """
    findings = [
        *_of_phases(record),
        *_of_transfers(record, others, link_bits_per_s or {}),
        *_of_retries(record),
    ]
    if record.outcome != "ok":
        why = record.error or "something else took its place"
        findings.insert(0, Finding(text=f"it {record.outcome}: {why}", cost_s=record.length_s))
    return tuple(sorted(findings, key=lambda each: -each.cost_s))


def summary_of(record: Record) -> str:
    """Return one line about the whole record."""
    who = f" of {record.replica}" if record.replica else ""
    at = f" at step {record.step}" if record.step is not None else ""
    size = f", {megabytes(record.num_bytes)}" if record.num_bytes else ""
    return f"{record.kind}{who}{at}: {record.outcome} in {record.length_s:.2f} s{size}"


def _of_phases(record: Record) -> list[Finding]:
    found = []
    for name, length_s in record.phase_lengths().items():
        if record.length_s and name != "transfer" and length_s >= _DOMINANT * record.length_s:
            about, remedy = _PHASES.get(name, ("", ""))
            if name == "quorum" and length_s < max(_LEAST_WAIT_S, _MUCH_OF_IT * record.length_s):
                # The others come to their step boundary, as expected.
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
    """Return a finding if another way was, or is, much faster."""
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
            f"{transfer.peer} was reached over {own} ({transfer.local_address} → {transfer.peer_address}) with "
            f"{megabytes(rate)}/s; over {best.interface} ({best.local_address} → {best.peer_address}) "
            f"{megabytes(best.bytes_per_s)}/s came, {times:.0f} times as much"
        )
        remedy = _ADVERTISE.format(interface=best.interface)
    elif same.bytes_per_s > _MUCH_SLOWER * rate:
        times = same.bytes_per_s / rate
        text = (
            f"{transfer.peer} sent {megabytes(rate)}/s over {own}; {same.peer} sent {megabytes(same.bytes_per_s)}/s "
            "over the same interface"
        )
        remedy = f"look at {transfer.peer}: its link, its load, or its TransportSettings.max_send_bytes_per_s"
    elif link and rate >= _NEAR_THE_LINK * link / 8 and faster > _MUCH_SLOWER * link:
        times = faster / link
        text = (
            f"{own} is a link of {link / 1e6:.0f} Mbit/s, and that was the limit; {name} has {faster / 1e6:.0f} Mbit/s"
        )
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
        text = f"tried again{f' with {peer}' if peer else ''} {times} s after the beginning: {last.cause}"
        found.append(Finding(text=text, remedy=_RETRIES.get(kind, ""), cost_s=last.at_s - first.at_s))
    return found


def _described(transfer: Transfer) -> str:
    way = (
        f" over {transfer.interface} ({transfer.local_address} → {transfer.peer_address})" if transfer.interface else ""
    )
    role = "" if transfer.role == "source" else f" ({transfer.role.replace('_', ' ')})"
    return f"{megabytes(transfer.num_bytes)} from {transfer.peer}{role}{way} with {megabytes(transfer.bytes_per_s)}/s"


def _part_of(length_s: float, record: Record) -> str:
    return f"{length_s:.2f} s of {record.length_s:.2f} s ({100 * length_s / record.length_s:.0f} %)"
