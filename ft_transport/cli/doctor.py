"""``ft-transport doctor``: is this host, and the way from it to its peers, fit for recoveries?"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

if TYPE_CHECKING:
    from ft_transport.cli.checks import Check

_MARKS: Final = {"ok": "✓", "warn": "!", "bad": "✗"}


def doctor_command(
    peers: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="URLs of replicas (what their transport tells).")
    ] = None,
    seconds_each: Annotated[float, typer.Option(help="For how long each way to a peer is measured.", min=0.1)] = 1.5,
    as_json: Annotated[bool, typer.Option("--json", help="One array of JSON.")] = False,
) -> None:
    """Look at this host and the way to its peers; say what is wrong, and which setting mends it.

    Each way is measured by a short fetch of real data over one connection, of 256 MiB at most. The job's token and
    certificates are taken from the environment. Exits with 1 if something is bad.
    """
    from ft_transport.cli.checks import check_host, check_peer
    from ft_transport.http.client.rate_probe import connecting
    from ft_transport.settings import TransportSettings

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
