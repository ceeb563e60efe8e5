"""The command itself: its subcommands by name, how errors become exit codes, and who decides how things look."""

from __future__ import annotations

import sys
from typing import Final

import typer

from ft_transport.cli.bench import bench_command
from ft_transport.cli.contents import NotComparedError, NothingThereError
from ft_transport.cli.demo import demo_command
from ft_transport.cli.diff import diff_command
from ft_transport.cli.doctor import doctor_command
from ft_transport.cli.explain import explain_command
from ft_transport.cli.fetch import fetch_command
from ft_transport.cli.inspect import inspect_command
from ft_transport.cli.status import status_command
from ft_transport.cli.top import top_command
from ft_transport.cli.trace import trace_command
from ft_transport.cli.verify import verify_command
from ft_transport.cli.watch_token import watch_token_command
from ft_transport.errors import PeerAuthenticationError, PeerUnreachableError, TransportError, escape_peer_text

_MAX_CHARACTERS: Final = 2000
_REMEDIES: Final[dict[type[TransportError], str]] = {
    PeerUnreachableError: "is it running there? ft-transport doctor URL looks at the way to it",
    PeerAuthenticationError: "FT_TRANSPORT_TOKEN and the files of TLS have to be those of the job",
}

app = typer.Typer(
    name="ft-transport",
    help="Look into replicated training: peers, snapshots, checkpoints and recoveries.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _common() -> None:
    """Look into replicated training: peers, snapshots, checkpoints and recoveries."""


app.command("bench")(bench_command)
app.command("demo", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(demo_command)
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
    """Run the command line. Exits with 0 if all is well, 1 if something is not as it should be, 2 for wrong usage."""
    try:
        app()
    except TransportError as error:
        cause = error.__cause__ if isinstance(error, NotComparedError) else error
        # It may quote a peer or a file.
        print(
            f"{type(cause).__name__}: {escape_peer_text(str(cause), max_characters=_MAX_CHARACTERS)}", file=sys.stderr
        )
        for kind, remedy in _REMEDIES.items():
            if isinstance(cause, kind):
                print(f"  → {remedy}", file=sys.stderr)
        sys.exit(2 if isinstance(error, NothingThereError | NotComparedError) else 1)
