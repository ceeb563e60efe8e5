"""``ft-transport diff``: are these two saves the same, bit for bit, and else what differs?"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from ft_transport.cli.contents import NotComparedError, NotFoundError
from ft_transport.cli.output import escape, megabytes
from ft_transport.errors import TransportError

if TYPE_CHECKING:
    from ft_transport.cli.differences import Comparison, Difference
    from ft_transport.cli.opened_states import OpenedStates
    from ft_transport.cli.stored_state import StoredState

_MAX_SHOWN: Final = 50
_TIMEOUT_S: Final = 60.0
_IN_WORDS: Final = {
    "ft_transport.tree": "what lies beside the tensors in a snapshot (names, order, numbers and texts of the state)",
    "ft_transport.meshes": "the meshes that DTensors lie on",
    "ft_transport.layouts": "how DTensors lie on their meshes",
}
"""Entries of a snapshot's file that describe the state itself, in words."""


def diff_command(
    one: Annotated[str, typer.Argument(metavar="A", help="URL, safetensors file, checkpoint, or DCP directory.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another one, of any of these kinds.")],
    step: Annotated[
        int | None, typer.Option(help="Of replicas the snapshot of this step; it may be one to come.", min=0)
    ] = None,
    digests: Annotated[
        bool, typer.Option("--digests", help="Believe the digests in files that fetch has written; read less.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON.")] = False,
) -> None:
    """Say whether two saves are bit-identical, and else which tensors differ, and by how much.

    All bytes are compared, however each side divides its tensors over files. Of two replicas the digests of their
    chunks are compared, at one step if they come to one, and only chunks that differ are fetched, to TMPDIR. Exits with
    0 if the two are identical, with 1 if they differ or two replicas come to no common step, with 2 if they cannot be
    compared.
    """
    from ft_transport.cli.differences import find_differences
    from ft_transport.cli.opened_states import opened_states

    _allow_many_files()
    try:
        with opened_states(one, other, step=step, by_digests=digests, timeout_s=_TIMEOUT_S) as opened:
            comparison = find_differences(opened.one, opened.other, chunks=opened.chunks)
            told = _as_object(opened, comparison) if as_json else _as_text(opened, comparison)
    except NotFoundError:
        raise
    except TransportError as error:
        raise NotComparedError(str(error)) from error
    typer.echo(msgspec.json.encode(told) if as_json else told)
    if comparison.differences or opened.steps_differ:
        raise typer.Exit(1)


def _as_object(opened: OpenedStates, comparison: Comparison) -> dict[str, Any]:
    return {
        "identical": not comparison.differences,
        "steps_differ": opened.steps_differ,
        "a": _side(opened.one),
        "b": _side(opened.other),
        "num_tensors": comparison.num_common,
        "num_bytes": comparison.num_bytes,
        "num_bytes_equal_by_digest": comparison.num_bytes_by_digest,
        "num_bytes_fetched": opened.num_bytes_fetched,
        "values_compared": comparison.has_values,
        "differences": [_difference(each) for each in comparison.differences],
    }


def _side(state: StoredState) -> dict[str, Any]:
    return {"name": state.name, "kind": state.contents.kind, "step": state.contents.step}


def _difference(difference: Difference) -> dict[str, Any]:
    told: dict[str, Any] = {"name": difference.name, "kind": difference.kind}
    told |= {"a": difference.one, "b": difference.other}
    if difference.tally is not None:
        told |= {
            "num_elements": difference.num_items,
            "num_elements_different": difference.tally.num_items,
            "num_bytes_different": difference.tally.num_bytes,
            "largest_difference": difference.tally.largest,
        }
    return told


def _as_text(opened: OpenedStates, comparison: Comparison) -> str:
    lines = []
    if opened.steps_differ:
        lines.append(
            f"✗ not of one step: A shows step {opened.one.contents.step}, B step {opened.other.contents.step}, and "
            "they came to none that both could show"
        )
    lines += [_line(each) for each in comparison.differences[:_MAX_SHOWN]]
    if len(comparison.differences) > _MAX_SHOWN:
        lines.append(f"  and {len(comparison.differences) - _MAX_SHOWN} more; --json lists all")
    for letter, state in (("A", opened.one), ("B", opened.other)):
        at = f", step {state.contents.step}" if state.contents.step is not None else ""
        lines.append(f"{letter}: {escape(state.name)}, {state.contents.kind}{at}")
    size = f"{comparison.num_common} tensors in common, {megabytes(comparison.num_bytes)}"
    if comparison.num_bytes_by_digest:
        size += f" ({megabytes(comparison.num_bytes_by_digest)} of it equal by their digests, and not read)"
    if opened.num_bytes_fetched:
        size += f", {megabytes(opened.num_bytes_fetched)} were fetched"
    if not comparison.has_values:
        size += "; what lies beside the tensors was not compared, it is stored in two ways"
    if comparison.differences:
        by_kind = Counter(each.kind for each in comparison.differences)
        lines.append(f"✗ {', '.join(f'{count} × {kind}' for kind, count in by_kind.most_common())}; {size}")
    else:
        lines.append(f"✓ bit-identical: {size}")
    return "\n".join(lines)


def _line(difference: Difference) -> str:
    name, tally = escape(difference.name), difference.tally
    match difference.kind:
        case "only in A" | "only in B":
            what = f" ({escape(difference.one or difference.other)})" if difference.one or difference.other else ""
            return f"✗ {name}: {difference.kind}{what}"
        case "dtype or shape":
            return f"✗ {name}: {escape(difference.one)} in A, {escape(difference.other)} in B"
        case "value":
            return f"✗ {_IN_WORDS.get(difference.name, name)}: another value"
        case "elements":
            assert tally is not None, "they were compared"
            most = f", at most by {tally.largest:.6g}" if tally.largest is not None else ""
            return (
                f"✗ {name}: {tally.num_items:,} of {difference.num_items:,} elements differ ({tally.num_bytes:,} "
                f"bytes){most}"
            )


def _allow_many_files() -> None:
    """A checkpoint has a file for each rank, and all of two are open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
