"""``ft-transport watch-token``: what lets somebody watch a job that has a token."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer


def watch_token_command(as_json: Annotated[bool, typer.Option("--json", help="An object of JSON.")] = False) -> None:
    """Print the watch token of the job token that the environment names.

    It is the password, with any user name, of a replica's page and metrics, and a bearer token for Prometheus. Whoever
    has it sees what the job does, and can neither read a state nor change anything. Exits with 1 if there is no token.
    """
    from ft_transport.settings import TransportSettings

    keys = TransportSettings().keys()
    if keys is None:
        typer.echo("the environment names no job token (FT_TRANSPORT_TOKEN, FT_TRANSPORT_TOKEN_FILE)", err=True)
        raise typer.Exit(1)
    token = keys.watch_tokens()[0]
    typer.echo(msgspec.json.encode({"watch_token": token}) if as_json else token)
