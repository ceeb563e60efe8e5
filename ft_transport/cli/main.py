"""The command itself: its subcommands by name, how errors become exit codes, and who decides how things look."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from ft_transport.cli.bench import bench_command
from ft_transport.cli.contents import NotComparedError, NotFoundError
from ft_transport.cli.demo import demo_command
from ft_transport.cli.diff import diff_command
from ft_transport.cli.doctor import doctor_command
from ft_transport.cli.explain import explain_command
from ft_transport.cli.fetch import fetch_command
from ft_transport.cli.inspect import inspect_command
from ft_transport.cli.output import message_of, remedy_for
from ft_transport.cli.status import status_command
from ft_transport.cli.top import top_command, watch_token_command
from ft_transport.cli.trace import trace_command
from ft_transport.cli.verify import verify_command
from ft_transport.errors import ConfigurationError, TransportError

app = typer.Typer(
    name="ft-transport",
    help="Look into replicated training: peers, snapshots, checkpoints and recoveries.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Joins the lines of a paragraph, so that it fits a terminal of any width.
    rich_markup_mode="markdown",
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ft-transport {importlib.metadata.version('ft-transport')}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Look into replicated training: peers, snapshots, checkpoints and recoveries."""


app.command("bench")(bench_command)
app.command(
    "demo",
    # Its help, too, is the demo's own.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(demo_command)
app.command("diff")(diff_command)
app.command("doctor")(doctor_command)
app.command("explain")(explain_command)
app.command("fetch")(fetch_command)
app.command("inspect")(inspect_command)
app.command("status")(status_command)
app.command("top")(top_command)
app.command("trace")(trace_command)
app.command("verify")(verify_command)
app.command("watch-token")(watch_token_command)


def main() -> None:
    """Run the command line. Exits with 0 if all is well, 1 if something is not as it should be, 2 for wrong usage.

    With 2 also where there is nothing of the name, or a URL or a setting cannot be one.
    """
    try:
        app()
    except TransportError as error:
        cause = error.__cause__ if isinstance(error, NotComparedError) else error
        assert isinstance(cause, TransportError), "that is what is not compared for"
        print(message_of(cause), file=sys.stderr)
        remedy = remedy_for(cause)
        if remedy:
            print(f"  → {remedy}", file=sys.stderr)
        sys.exit(2 if isinstance(error, NotFoundError | NotComparedError | ConfigurationError) else 1)
