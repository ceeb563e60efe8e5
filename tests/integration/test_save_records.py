"""What saves, loads and publishing leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_transport import CheckpointStore, Publisher
from ft_transport.errors import CheckpointExistsError, CheckpointNotFoundError
from ft_transport.telemetry.recorder import Recorder, current

pytestmark = [pytest.mark.timeout(120)]

STATE = {"model": {"w": torch.arange(1 << 18, dtype=torch.float32)}}


def test_saves_and_loads_leave_a_record_each_and_say_why_they_failed(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, recorder=Recorder(path=tmp_path.with_suffix(".records"))) as store:
        handle = store.save(7, STATE)
        assert current() is None
        handle.result()
        loaded = store.load(into={"model": {"w": torch.zeros(1 << 18)}})
        assert store.load_newest_good() is not None
        with pytest.raises(CheckpointExistsError):
            store.save(7, STATE, wait=True)
        with pytest.raises(CheckpointNotFoundError):
            store.load(3)
        store.wait()
        save, *loads, again, missing = store.recorder.recent()
    assert (save.kind, save.outcome, save.step) == ("save", "ok", 7)
    assert [phase.name for phase in save.phases] == ["clone", "agree", "write"]
    assert [(load.kind, load.outcome, load.step) for load in loads] == [("load", "ok", 7)] * 2
    assert [phase.name for phase in loads[0].phases] == ["find", "read"]
    assert loads[0].num_bytes == loaded.num_bytes_read
    assert (again.kind, again.outcome) == ("save", "failed")
    assert "7" in again.error
    assert (missing.kind, missing.outcome) == ("load", "failed")
    assert missing.error.startswith("CheckpointNotFoundError")
    assert len(tmp_path.with_suffix(".records").read_bytes().splitlines()) == 5


def test_a_version_that_is_published_leaves_a_record(tmp_path: Path) -> None:
    with Publisher((), tmp_path) as publisher:
        publisher.publish(4, {"w": torch.ones(16)}).result()
    (record,) = publisher.recorder.recent()
    assert (record.kind, record.outcome, record.step) == ("publish", "ok", 4)
    assert [phase.name for phase in record.phases] == ["export", "deliver"]
