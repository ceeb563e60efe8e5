"""What saves, loads and publishing leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_transport import CheckpointStore, Publisher
from ft_transport.errors import TransportError
from ft_transport.telemetry.recorder import Recorder, current

pytestmark = [pytest.mark.timeout(120)]

STATE = {"model": {"w": torch.arange(1 << 18, dtype=torch.float32)}}


def test_a_save_and_a_load_leave_a_record_each(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, recorder=Recorder(path=tmp_path.with_suffix(".records"))) as store:
        handle = store.save(7, STATE)
        assert current() is None
        handle.result()
        store.wait()
        loaded = store.load(into={"model": {"w": torch.zeros(1 << 18)}})
        assert store.load_newest_good() is not None
        save, *loads = store.recorder.recent()
    assert (save.kind, save.outcome, save.step) == ("save", "ok", 7)
    assert [phase.name for phase in save.phases] == ["clone", "agree", "write"]
    assert [(load.kind, load.outcome, load.step) for load in loads] == [("load", "ok", 7)] * 2
    assert [phase.name for phase in loads[0].phases] == ["find", "read"]
    assert loads[0].num_bytes == loaded.num_bytes_read
    assert len(tmp_path.with_suffix(".records").read_bytes().splitlines()) == 3


def test_a_save_that_fails_says_why(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, STATE, wait=True)
        with pytest.raises(TransportError):
            store.save(1, STATE, wait=True)
        store.wait()
        first, second = store.recorder.recent()
    assert (first.outcome, second.outcome) == ("ok", "failed")
    assert "1" in second.error


def test_a_load_of_what_is_not_there_says_so(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(TransportError):
            store.load(3)
        (record,) = store.recorder.recent()
    assert (record.kind, record.outcome) == ("load", "failed")
    assert record.error.startswith("CheckpointNotFoundError")


def test_a_version_that_is_published_leaves_a_record(tmp_path: Path) -> None:
    with Publisher((), tmp_path) as publisher:
        publisher.publish(4, {"w": torch.ones(16)}).result()
    (record,) = publisher.recorder.recent()
    assert (record.kind, record.outcome, record.step) == ("publish", "ok", 4)
    assert [phase.name for phase in record.phases] == ["export", "deliver"]
