"""The command itself: its subcommands by name, and how errors become exit codes."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from ft_transport.cli.contents import NotFoundError
from ft_transport.cli.output import print_error
from ft_transport.errors import ConfigurationError, TransportError

_LOOK: Final[dict[str, Any]] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    # Joins the lines of a paragraph, so that it fits a terminal of any width.
    "rich_markup_mode": "markdown",
}
_MODULES: Final = {
    **{name: name for name in ("bench", "diff", "doctor", "explain", "fetch", "inspect", "top", "verify")},
    "status": "doctor",
    "trace": "explain",
    "watch-token": "top",
}
"""The module of each subcommand that is imported on use: ``explain`` needs neither aiohttp nor numpy."""


class _Subcommands(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return sorted({*self.commands, *_MODULES})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # The parser suggests names like a misspelled one from those that it has.
        needed = [cmd_name] if cmd_name in self.commands or cmd_name in _MODULES else [*_MODULES]
        for name in needed:
            if name not in self.commands:
                module = importlib.import_module(f"ft_transport.cli.{_MODULES[name]}")
                single = typer.Typer(**_LOOK)
                single.command(name)(getattr(module, f"{name.replace('-', '_')}_command"))
                self.commands[name] = typer.main.get_command(single)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Subcommands,
    name="ft-transport",
    help="Look into replicated training: peers, snapshots, checkpoints and recoveries.",
    no_args_is_help=True,
    **_LOOK,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ft-transport {importlib.metadata.version('ft-transport')}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Look into replicated training: peers, snapshots, checkpoints and recoveries."""


@app.command(
    "demo",
    # Its help, too, is the demo's own.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _demo(context: typer.Context) -> None:
    """Train three small replicas here, kill some, and compare what all of them held (needs torchft).

    Takes what ``python -m manager.demo`` takes: --steps, --width, --num-layers, --sharded.
    """
    try:
        from manager.demo.__main__ import main as run
    except ImportError as error:
        typer.echo(f"the demo needs torchft: pip install 'ft-transport[torchft]' ({error})", err=True)
        raise typer.Exit(2) from error
    run(context.args, program="ft-transport demo")


def main() -> None:
    """Run the command line. Exits with 0 if all is well, 1 if something is not as it should be, 2 for wrong usage.

    The exit code is 2 also if nothing of that name exists, or if a URL or a setting is malformed.
    """
    try:
        app()
    except TransportError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, NotFoundError | ConfigurationError) else 1)
