"""``ft-transport status``: what do these replicas serve?"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from ft_transport.cli.output import escape, megabytes, message_of, remedy_for
from ft_transport.errors import ConfigurationError, TransportError
from ft_transport.http.client.manifests import PeerStatus
from ft_transport.http.client.rate_probe import Connect, ask_status, connecting
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.settings import TransportSettings


def status_command(
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL", help="URLs of replicas (as `metadata()` of their transport returns them)."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One array of JSON.")] = False,
) -> None:
    """Ask replicas what they serve: step, size, and how many receive it now.

    All are asked at once, for 3 s at most. The job's token and certificates are taken from the environment. Exits with
    1 if one of them does not answer, with 2 if one is no URL.
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
        return f"✓ {url}  {replica}: has no snapshot now; it takes one when somebody recovers"
    return f"✓ {url}  {replica}: step {answer.step}, {megabytes(answer.snapshot_bytes)}, {answer.clients} receive it"
