"""The command ``ft-transport``: finds the module of each subcommand, and converts errors to exit codes."""

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
    # Join the lines of a paragraph, so that the help fits a terminal of any width.
    "rich_markup_mode": "markdown",
}
_MODULES: Final = {
    **{
        name: name
        for name in ("bench", "copy", "diff", "doctor", "explain", "fetch", "inspect", "keepers", "top", "verify")
    },
    "status": "doctor",
    "trace": "explain",
    "watch-token": "top",
}
"""The module of each subcommand. It is imported on use, so that ``explain`` does not load aiohttp and numpy."""


class _Subcommands(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return sorted({*self.commands, *_MODULES})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # For an unknown name, load all subcommands: the parser then suggests similar names.
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look into replicated training: peers, snapshots, checkpoints and recoveries."""


@app.command(
    "demo",
    # The demo parses all options itself, including --help.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _demo(context: typer.Context) -> None:
    """Train three small replicas on this machine, kill some of them, and compare the final states (needs torchft).

    Options are those of ``python -m manager.demo``: --steps, --width, --num-layers, --sharded.
    """
    try:
        from manager.demo.__main__ import main as run
    except ImportError as error:
        typer.echo(f"the demo needs torchft: pip install 'ft-transport[torchft]' ({error})", err=True)
        raise typer.Exit(2) from error
    run(context.args, program="ft-transport demo")


def main() -> None:
    """Run the command line.

    The exit code is 0 for success; 1 if a command finds a fault or fails; 2 for wrong usage, a target that does not
    exist, and a malformed URL or setting.
    """
    try:
        app()
    except TransportError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, NotFoundError | ConfigurationError) else 1)
