"""``ft-transport explain``: why was that recovery slow?"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from ft_transport.cli.records_files import read_records
from ft_transport.errors import escape_peer_text
from ft_transport.telemetry.explain import Explanation, explain, phase_lengths
from ft_transport.telemetry.record import KINDS, Record

_INTERFACES: Final = Path("/sys/class/net")
_BAR: Final = 40
_LONG_S: Final = 1e9
_MAX_CHARACTERS: Final = 600


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
    records = read_records(files, on_missing=lambda said: typer.echo(f"! {_shown(said)}", err=True))
    chosen = [record for record in records if not kind or record.kind == kind]
    if slowest:
        chosen.sort(key=lambda record: record.length_s)
    chosen = chosen[-last:]
    if not chosen:
        typer.echo(f"expected {kind or 'a record'} in {', '.join(map(str, files))}, there is none", err=True)
        raise typer.Exit(1)
    links = link_speeds()
    for number, record in enumerate(chosen):
        explanation = explain(record, others=[each for each in records if each is not record], link_bits_per_s=links)
        if as_json:
            typer.echo(msgspec.json.encode(_as_object(record, explanation)))
        else:
            typer.echo(("\n" if number else "") + _as_text(record, explanation))
    if any(record.outcome != "ok" for record in chosen):
        raise typer.Exit(1)


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


def _as_object(record: Record, explanation: Explanation) -> dict[str, Any]:
    return {
        "summary": explanation.summary,
        "phases": phase_lengths(record),
        "findings": msgspec.to_builtins(explanation.findings),
        "record": msgspec.to_builtins(record),
    }


def _as_text(record: Record, explanation: Explanation) -> str:
    lines = [_shown(explanation.summary), f"began {_date(record.begun_unix_s)}, rank {record.group_rank}", ""]
    for name, length_s in phase_lengths(record).items():
        # In records of other origin a phase may be longer than the whole.
        share = min(1.0, max(0.0, length_s / record.length_s)) if record.length_s else 0.0
        lines.append(f"  {_shown(name):<11} {_seconds(length_s)} {100 * share:4.0f} %  {'█' * round(_BAR * share)}")
    for finding in explanation.findings:
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
    return f"{length_s:9.3f} s" if abs(length_s) < _LONG_S else f"{length_s:9.3g} s"


def _shown(text: str) -> str:
    """Escape text of a record, which may come from a peer."""
    return escape_peer_text(text, max_characters=_MAX_CHARACTERS)
