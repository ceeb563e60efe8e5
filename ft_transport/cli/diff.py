"""``ft-transport diff``: finds out whether two saves are bit-identical, and otherwise lists the differences."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from ft_transport.cli.compare import Pair, Tally, compare
from ft_transport.cli.contents import NotFoundError
from ft_transport.cli.copy import is_bucket, local_copy
from ft_transport.cli.inspect import checkpoint_at, is_url, open_source
from ft_transport.cli.output import escape, megabytes, print_error
from ft_transport.cli.stored_state import StoredFile, StoredState, StoredTensor
from ft_transport.cli.verify import DIGESTS, read_manifest
from ft_transport.errors import TransportError
from ft_transport.runtime.threads import SafeExecutor

if TYPE_CHECKING:
    from ft_transport.cli.snapshot_files import SnapshotFiles, UnequalChunks
    from ft_transport.wire.manifest import Manifest
    from ft_transport.wire.routes import StepSelector

_MAX_SHOWN: Final = 50
_IN_WORDS: Final = {
    "ft_transport.tree": "the part of the state that is not tensors (names, order, numbers and texts)",
    "ft_transport.meshes": "the device meshes of DTensors",
    "ft_transport.layouts": "the placements of DTensors on their device meshes",
}
"""Descriptions of metadata in a snapshot's file, for messages."""

_OF_THE_FILE: Final = frozenset(f"ft_transport.{name}" for name in ("step", "snapshot", "digests", "digest"))
"""Metadata in a snapshot's file that describes the file instead of the state; it is not compared."""

Kind = Literal["only in A", "only in B", "dtype or shape", "elements", "value"]


def diff_command(
    one: Annotated[
        str,
        typer.Argument(
            metavar="A", help="URL of a replica or a bucket, safetensors file, checkpoint, or DCP directory."
        ),
    ],
    other: Annotated[str, typer.Argument(metavar="B", help="Another save, of any of these kinds.")],
    step: Annotated[
        int | None, typer.Option(help="Step of the snapshots of replicas; it may be a future step.", min=0)
    ] = None,
    digests: Annotated[
        bool, typer.Option("--digests", help="Trust the digests in files that fetch has written, and read less.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether two saves are bit-identical. If not, list the tensors that differ, and by how much.

    All bytes are compared, even if the saves divide their tensors into different files. For two replicas, the digests
    of their chunks are compared, at a common step if possible, and only chunks that differ are fetched, into TMPDIR.
    Exits with 0 if the saves are identical, with 1 if they differ or the replicas reach no common step, with 2 if they
    cannot be compared.
    """
    _allow_many_files()
    try:
        with opened_states(one, other, step=step, by_digests=digests, timeout_s=60.0) as opened:
            comparison = find_differences(opened.one, opened.other, chunks=opened.chunks)
            result = _as_object(opened, comparison) if as_json else _as_text(opened, comparison)
    except NotFoundError:
        raise
    except TransportError as error:
        print_error(error)
        raise typer.Exit(2) from error
    typer.echo(msgspec.json.encode(result) if as_json else result)
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
    result: dict[str, Any] = {"name": difference.name, "kind": difference.kind}
    result |= {"a": difference.one, "b": difference.other}
    if difference.tally is not None:
        result |= {
            "num_elements": difference.num_items,
            "num_elements_different": difference.tally.num_items,
            "num_bytes_different": difference.tally.num_bytes,
            "largest_difference": difference.tally.largest,
        }
    return result


def _as_text(opened: OpenedStates, comparison: Comparison) -> str:
    lines = []
    if opened.steps_differ:
        lines.append(
            f"✗ different steps: A has step {opened.one.contents.step}, B has step {opened.other.contents.step}, and "
            "the replicas reached no common step"
        )
    lines += [_line(each) for each in comparison.differences[:_MAX_SHOWN]]
    if len(comparison.differences) > _MAX_SHOWN:
        lines.append(f"  and {len(comparison.differences) - _MAX_SHOWN} more; --json lists all")
    for letter, state in (("A", opened.one), ("B", opened.other)):
        at = f", step {state.contents.step}" if state.contents.step is not None else ""
        lines.append(f"{letter}: {escape(state.name)}, {state.contents.kind}{at}")
    size = f"{comparison.num_common} tensors in common, {megabytes(comparison.num_bytes)}"
    if comparison.num_bytes_by_digest:
        size += f" ({megabytes(comparison.num_bytes_by_digest)} of them have equal digests, and were not read)"
    if opened.num_bytes_fetched:
        size += f", {megabytes(opened.num_bytes_fetched)} were fetched"
    if not comparison.has_values:
        size += "; values other than tensors were not compared, because A and B have different formats"
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
            return f"✗ {_IN_WORDS.get(difference.name, name)}: different values"
        case "elements":
            assert tally is not None, "they were compared"
            most = f", at most by {tally.largest:.6g}" if tally.largest is not None else ""
            return (
                f"✗ {name}: {tally.num_items:,} of {difference.num_items:,} elements differ ({tally.num_bytes:,} "
                f"bytes){most}"
            )


def _allow_many_files() -> None:
    """Raise the limit of open files: the comparison opens all files of both checkpoints, at least one for each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True, slots=True)
class OpenedStates:
    """Two opened states to compare.

    Attributes:
        one: The first state.
        other: The second state.
        chunks: The chunks whose digests differ; ``None`` if all bytes must be compared.
        num_bytes_fetched: Number of bytes that were fetched from replicas.
        steps_differ: Whether two replicas reached no common step, so that their snapshots are of different steps.
    """

    one: StoredState
    other: StoredState
    chunks: UnequalChunks | None
    num_bytes_fetched: int
    steps_differ: bool = False


@contextlib.contextmanager
def opened_states(
    one: str, other: str, *, step: int | None, by_digests: bool, timeout_s: float
) -> Iterator[OpenedStates]:
    """Open two states, as a context manager. From two replicas, only chunks with different digests are fetched.

    Args:
        one: The URL or path of the first state.
        other: The URL or path of the second state.
        step: The step of the replicas' snapshots; ``None`` for the newest step, or for a common step of two replicas if
            possible.
        by_digests: Whether to trust the digests in files, and to compare only chunks whose digests differ.
        timeout_s: Longest time without data from a replica, in seconds.

    Raises:
        UnreadableError: A file or directory is unreadable.
        TransportError: A replica is unreachable, or a file cannot be written.
    """
    with contextlib.ExitStack() as held:
        files: SnapshotFiles | None = None
        known: Manifest | None = None
        twin: Manifest | None = None
        steps_differ = False
        paths = {
            target: held.enter_context(local_copy(target, with_data=True))[0]
            for target in {one, other}
            if is_bucket(target)
        }
        if is_url(one) or is_url(other):
            from ft_transport.cli.snapshot_files import SnapshotFiles, differing_from

            directory = held.enter_context(tempfile.TemporaryDirectory(prefix="ft-transport-diff-"))
            files = SnapshotFiles(Path(directory), timeout_s)
            chosen: StepSelector = "latest" if step is None else step
            if is_url(one) and is_url(other):
                first, second = files.fetch_both(one, other, step)
                known, twin = first.manifest, second.manifest
                steps_differ = known.step != twin.step
            else:
                known = _manifest_of(other if is_url(one) else one, paths) if by_digests else None
                twin = files.fetch(one if is_url(one) else other, chosen, differing_from(known)).manifest
        elif by_digests:
            known, twin = _manifest_of(one, paths), _manifest_of(other, paths)
        chunks: UnequalChunks | None = None
        if known is not None and twin is not None:
            from ft_transport.cli.snapshot_files import UnequalChunks

            chunks = UnequalChunks.of(known, twin)
        fetched = files.paths if files is not None else {}
        # Reading DCP's metadata starts a process for each state; let both run at once.
        with SafeExecutor(2, "ft-transport-open") as pool:
            opening = [
                pool.submit(_open, target, paths.get(target, Path(target)), fetched.get(target))
                for target in (one, other)
            ]
        for each in opening:
            if each.exception() is None:
                held.enter_context(each.result())
        yield OpenedStates(
            opening[0].result(),
            opening[1].result(),
            chunks,
            files.num_bytes if files is not None else 0,
            steps_differ=steps_differ,
        )


def _manifest_of(target: str, copies: Mapping[str, Path]) -> Manifest | None:
    """Return the manifest in a file that ``fetch`` has written; ``None`` for other files and for directories."""
    path = checkpoint_at(copies.get(target, Path(target)))
    if path.is_dir() or DIGESTS not in open_source(str(path)).metadata:
        return None
    with contextlib.closing(StoredFile.at(path)) as file:
        return read_manifest(file)


def _open(target: str, path: Path, fetched: Path | None) -> StoredState:
    if fetched is None:
        path = checkpoint_at(path)
        state = StoredState(path, open_source(str(path), with_positions=True), name=target)
    else:
        contents = replace(open_source(str(fetched)), kind="snapshot of a replica")
        state = StoredState(fetched, contents, name=target)
    with contextlib.ExitStack() as stack:
        stack.push(state)
        state.locate_all()
        stack.pop_all()
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between state A and state B in one tensor or value.

    Attributes:
        name: Name of the tensor or value.
        kind: The kind of difference.
        one: Dtype and shape in A, as text; empty if A lacks it.
        other: Dtype and shape in B, as text; empty if B lacks it.
        num_items: Number of elements of the tensor; 0 if no elements were compared.
        tally: Counts of the elements that differ; ``None`` if no elements were compared.
    """

    name: str
    kind: Kind
    one: str = ""
    other: str = ""
    num_items: int = 0
    tally: Tally | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison of two states.

    Attributes:
        differences: The differences, in the order of state A, followed by those in tensors that only state B has.
        num_common: Number of tensors that both states have.
        num_bytes: Number of bytes of the tensors and values that both states have.
        num_bytes_by_digest: Number of bytes that were not read, because the digests of their chunks are equal.
        has_values: Whether values other than tensors were compared; only states of the same format allow this.
    """

    differences: tuple[Difference, ...]
    num_common: int
    num_bytes: int
    num_bytes_by_digest: int
    has_values: bool


def find_differences(one: StoredState, other: StoredState, *, chunks: UnequalChunks | None) -> Comparison:
    """Compare two states.

    Args:
        one: State A.
        other: State B.
        chunks: The chunks whose digests differ: only these are compared. ``None`` to compare all bytes.

    Raises:
        UnreadableError: A file is unreadable.
    """
    found: dict[str, Difference] = {}
    num_bytes, left_out = 0, 0
    pairs: dict[str, list[Pair]] = {"elements": [], "value": []}
    has_values = one.contents.form == other.contents.form
    sides: list[tuple[Kind, dict[str, StoredTensor], dict[str, StoredTensor]]] = [
        ("elements", one.tensors, other.tensors),
        ("value", one.values, other.values),
    ]
    for kind, ones, others in sides[: 1 + has_values]:
        for name, tensor in ones.items():
            twin = others.get(name)
            if twin is None:
                found[name] = Difference(name=name, kind="only in A", one=_shown(tensor))
            elif (tensor.dtype, tensor.shape) != (twin.dtype, twin.shape):
                unlike: Kind = "dtype or shape" if kind == "elements" else "value"
                found[name] = Difference(name=name, kind=unlike, one=_shown(tensor), other=_shown(twin))
            else:
                ranges = chunks.ranges_of(name) if chunks is not None else None
                size = tensor.num_bytes
                num_bytes += size
                left_out += size - sum(end - start for start, end in ranges) if ranges is not None else 0
                pairs[kind].append(Pair(name, tensor, twin, ranges))
        for name, twin in others.items():
            if name not in ones:
                found[name] = Difference(name=name, kind="only in B", other=_shown(twin))
    for kind, _, _ in sides:
        by_name = {pair.name: pair for pair in pairs[kind]}
        for name, tally in compare(pairs[kind]).items():
            tensor, shown = by_name[name].one, _shown(by_name[name].one)
            num_items = tensor.num_bytes // tensor.item_bytes
            found[name] = Difference(name=name, kind=kind, num_items=num_items, tally=tally, one=shown, other=shown)
    if has_values:
        _compare_metadata(one.contents.metadata, other.contents.metadata, found)
    order = {name: at for at, name in enumerate([*one.tensors, *one.values, *other.tensors, *other.values])}
    return Comparison(
        differences=tuple(sorted(found.values(), key=lambda each: order.get(each.name, len(order)))),
        num_common=len(pairs["elements"]),
        num_bytes=num_bytes,
        num_bytes_by_digest=left_out,
        has_values=has_values,
    )


def _compare_metadata(one: dict[str, str], other: dict[str, str], found: dict[str, Difference]) -> None:
    for name in {**one, **other}:
        if name in _OF_THE_FILE or one.get(name) == other.get(name):
            continue
        kind: Kind = "only in B" if name not in one else "only in A" if name not in other else "value"
        found[name] = Difference(name=name, kind=kind)


def _shown(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {'×'.join(map(str, tensor.shape)) or '·'}"
