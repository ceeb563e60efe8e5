"""``ft-transport demo``: replicas that heal each other, on this machine."""

from __future__ import annotations

import typer


def demo_command(context: typer.Context) -> None:
    """Train three small replicas here, kill some, and compare what all of them held (needs torchft).

    Takes what ``python -m manager.demo`` takes: --steps, --width, --num-layers, --sharded.
    """
    try:
        from manager.demo.__main__ import main
    except ImportError as error:
        typer.echo(f"the demo needs torchft: pip install 'ft-transport[torchft]' ({error})", err=True)
        raise typer.Exit(2) from error
    main(context.args, program="ft-transport demo")
