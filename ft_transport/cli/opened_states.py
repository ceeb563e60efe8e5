"""Opens two states for comparison as files; fetches snapshots of replicas first."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ft_transport.cli.differences import UnequalChunks
from ft_transport.cli.inspect import checkpoint_at, is_url, open_source
from ft_transport.cli.stored_file import StoredFile
from ft_transport.cli.stored_state import StoredState, open_state
from ft_transport.cli.wholeness import DIGESTS, read_manifest
from ft_transport.runtime.handler_safety import SafeExecutor

if TYPE_CHECKING:
    from ft_transport.cli.snapshot_files import SnapshotFiles
    from ft_transport.wire.manifest import Manifest
    from ft_transport.wire.routes import StepSelector


@dataclass(frozen=True, slots=True)
class OpenedStates:
    """Both; ``chunks`` are those that differ by their digests, where these decide.

    ``steps_differ``: two replicas that came to no step at which both could be asked.
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
    """Open two states. From two replicas, only chunks with different digests are fetched.

    Args:
        one: A URL or a path.
        other: Another one.
        step: The step of the replicas' snapshots; by default the newest, or a common one of two replicas if possible.
        by_digests: Whether to trust the digests in files, too.
        timeout_s: Longest silence of a replica in seconds.

    Raises:
        UnreadableError: One of them is unreadable.
        TransportError: A replica is unreachable, or a file cannot be written.
    """
    with contextlib.ExitStack() as held:
        files: SnapshotFiles | None = None
        known: Manifest | None = None
        twin: Manifest | None = None
        steps_differ = False
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
                known = _manifest_of(other if is_url(one) else one) if by_digests else None
                twin = files.fetch(one if is_url(one) else other, chosen, differing_from(known)).manifest
        elif by_digests:
            known, twin = _manifest_of(one), _manifest_of(other)
        chunks = None
        if known is not None and twin is not None and UnequalChunks.are_comparable(known, twin):
            chunks = UnequalChunks(known, twin)
        paths = files.paths if files is not None else {}
        # DCP's metadata are read in a process each.
        with SafeExecutor(2, "ft-transport-open") as pool:
            opening = [pool.submit(_open, thing, paths.get(thing)) for thing in (one, other)]
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


def _manifest_of(thing: str) -> Manifest | None:
    """Return the manifest of a file that ``fetch`` has written; ``None`` for anything else."""
    path = checkpoint_at(Path(thing))
    if path.is_dir() or DIGESTS not in open_source(thing).metadata:
        return None
    file = StoredFile.at(path)
    try:
        return read_manifest(file)
    finally:
        file.close()


def _open(thing: str, fetched: Path | None) -> StoredState:
    if fetched is None:
        return open_state(thing, checkpoint_at(Path(thing)), open_source(thing, with_places=True))
    contents = replace(open_source(str(fetched)), kind="snapshot of a replica")
    return open_state(thing, fetched, contents)
