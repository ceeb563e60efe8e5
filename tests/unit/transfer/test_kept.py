"""A process takes over a kept snapshot from its predecessor's keeper, but no false one."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import kept_trainer
import msgspec
import pytest
import torch
from keepers import Trainer

from ft_transport import HTTPTransport, ManifestError, SnapshotError
from ft_transport.credentials import Keys
from ft_transport.runtime.unix_sockets import shared_address
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.transfer.kept import KeptSnapshots
from ft_transport.transfer.kept_part import KeptPart
from ft_transport.wire.chunks import PLAIN, Digester
from ft_transport.wire.snapshot import MemoryFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

STEP = 7
STATE = {"weight": torch.arange(1000.0)}
OWN, OTHER = Keys.of("own-token"), Keys.of("other-token")


def file_of(digester: Digester) -> tuple[int, bytes]:
    """A snapshot's place in a memory file, and its bytes."""
    stager = Stager(max_snapshots=1, num_threads=1, chunk_bytes=1 << 20)
    try:
        snapshot = stager.begin(Taking(step=STEP, state=STATE), digester=digester).finish()
        memory = snapshot.memory
        assert isinstance(memory, MemoryFile)
        return memory.start, os.pread(memory.descriptor, snapshot.total_bytes, memory.start)
    finally:
        stager.close()


@contextmanager
def taken_over(
    path: Path, content: bytes, start: int, keys: Keys | None, *, is_sealed: bool = True, step: int = STEP
) -> Iterator[tuple[KeptSnapshots, HTTPTransport]]:
    """What a process has taken over from the keeper of one that held this file."""
    slot = uuid4().hex
    path.write_bytes(content)
    about = msgspec.msgpack.encode({"part": {"step": step}, "start": start, "num_bytes": len(content)})
    trainer = Trainer(kept_trainer.__file__, str(path.with_name("notes")), "a", slot)
    trainer.run("file = os.memfd_create('held', os.MFD_ALLOW_SEALING)")
    trainer.run(f"os.pwrite(file, open({str(path)!r}, 'rb').read(), {start})")
    if is_sealed:
        seals = 0x10 | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # F_SEAL_FUTURE_WRITE
        trainer.run(f"import fcntl; fcntl.fcntl(file, fcntl.F_ADD_SEALS, {seals})")
    trainer.run(f"keeper.hold('a', 1, {about!r}, file)")
    trainer.kill()
    transport = HTTPTransport()
    # The keeper asks for no secret here: the file must stand for itself.
    kept = KeptSnapshots(transport.server, keys, transport.new_server)
    kept._secrets = lambda _address: [b""]  # type: ignore[method-assign]
    try:
        kept.open(shared_address(slot))
        yield kept, transport
    finally:
        kept.close(is_over=True)
        transport.shutdown()


@pytest.mark.parametrize("keys", [None, OWN], ids=["no token", "token"])
def test_a_kept_snapshot_is_served_exactly(tmp_path: Path, keys: Keys | None) -> None:
    digester = Digester.of(keys.current()[0]) if keys is not None else PLAIN
    start, content = file_of(digester)
    with taken_over(tmp_path / "file", content, start, keys) as (kept, transport):
        assert [part.step for part in kept.parts()] == [STEP]
        with kept.serving(KeptPart(step=STEP)):
            if keys is None:
                received = transport.fetch(transport.metadata(), STEP)
                assert torch.equal(received.state["weight"], STATE["weight"])
        with pytest.raises(SnapshotError, match="of the step, got none"), kept.serving(KeptPart(step=STEP + 1)):
            pass


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: os.urandom(len(content)), "expected a snapshot of"),
        (lambda content: content[:8] + b"{" * 100 + content[108:], "header of a snapshot"),
        (lambda content: content[:-1], "got one of step 7"),
        (lambda content: b"", "expected a snapshot of"),
    ],
    ids=["noise", "no header", "cut off", "empty"],
)
def test_a_false_snapshot_is_refused(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    start, content = file_of(PLAIN)
    with (
        taken_over(tmp_path / "file", spoil(content), start, None) as (kept, _),
        pytest.raises(ManifestError, match=message),
        kept.serving(KeptPart(step=STEP)),
    ):
        pass


@pytest.mark.parametrize(
    ("digester", "keys"),
    [(Digester.of(OTHER.current()[0]), OWN), (PLAIN, OWN), (Digester.of(OTHER.current()[0]), None)],
    ids=["another token", "no token", "unexpected token"],
)
def test_a_snapshot_of_another_job_is_refused(tmp_path: Path, digester: Digester, keys: Keys | None) -> None:
    start, content = file_of(digester)
    with (
        taken_over(tmp_path / "file", content, start, keys) as (kept, _),
        pytest.raises(ManifestError, match="digests"),
        kept.serving(KeptPart(step=STEP)),
    ):
        pass


def test_memory_that_may_change_is_refused(tmp_path: Path) -> None:
    start, content = file_of(PLAIN)
    with (
        taken_over(tmp_path / "file", content, start, None, is_sealed=False) as (kept, _),
        pytest.raises(ManifestError, match="nobody can change"),
        kept.serving(KeptPart(step=STEP)),
    ):
        pass


def test_a_snapshot_under_the_number_of_another_step_is_refused(tmp_path: Path) -> None:
    start, content = file_of(PLAIN)
    with (
        taken_over(tmp_path / "file", content, start, None, step=STEP + 1) as (kept, _),
        pytest.raises(ManifestError, match="snapshot of step 8"),
        kept.serving(KeptPart(step=STEP + 1)),
    ):
        pass
