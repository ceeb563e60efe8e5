"""The steps of a collective write, on one rank: their order, what is planned anew, and what a failure leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ft_transport.checkpoint import save_job
from ft_transport.checkpoint.collective_write import CollectiveWrite, TakenSnapshot
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.roots import DirectoryRoot
from ft_transport.checkpoint.save_job import SaveJob, SaveResources
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.staging import StagedState
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import RankFailedError, StateMovedError

_TIMEOUT = timedelta(seconds=10)
_PASSING = OSError(errno.EIO, os.strerror(errno.EIO))
_LASTING = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Saves:
    """Runs saves, and notes which of a job's methods are called; each raises the errors given for it, one a call."""

    def __init__(self, root: Path) -> None:
        self.calls: list[str] = []
        self.failures: dict[str, list[Exception]] = {}
        self.snapshot = TakenSnapshot(structure=1, values=1, holder=1)
        self.retries: list[bool] = []
        self.agreement = Agreement(RankGroup.of(None), "test", _TIMEOUT)
        directory = NumberedDirectory(root, "step", None)
        self._resources = SaveResources(
            agreement=self.agreement,
            collective=CollectiveWrite(self.agreement, DirectoryRoot(directory), all_write=True),
            writer=WriterProcess(),
            settings=StoreSettings(),
            trust=Trust(None, "", accepts_unsigned=False),
            consolidate=None,
            completed=lambda step: self.note("committed"),
            take_damage=lambda: False,
        )

    def save(self, step: int, content: str) -> None:
        RecordingJob(self, content, self._resources, step, StagedState(), overwrite=False).run()

    def note(self, name: str) -> None:
        self.calls.append(name)
        if self.failures.get(name):
            raise self.failures[name].pop(0)


class RecordingJob(SaveJob):
    def __init__(self, saves: Saves, content: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves, self._content = saves, content

    def settings(self) -> Mapping[str, object]:
        self._saves.note("settings")
        return {"content": self._content}

    def admit(self, *, is_retry: bool) -> None:
        self._saves.note("admit")
        self._saves.retries.append(is_retry)

    def take(self) -> TakenSnapshot:
        self._saves.note("take")
        return self._saves.snapshot

    def header(self) -> bytes:
        self._saves.note("header")
        return b"header"

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        self._saves.note("plan")
        assert headers == [b"header"]
        return [RankPlan(items=(0,), compared=(0,))]

    def digest(self, plan: RankPlan) -> bytes:
        self._saves.note("digest")
        return b"digest"

    def compare(self, digests: Sequence[bytes]) -> None:
        self._saves.note("compare")
        assert digests == [b"digest"]

    def write(self, location: str, plan: RankPlan) -> Callable[[], bytes | None]:  # type: ignore[override]
        def write() -> None:
            self._saves.note("write")
            (Path(location) / "data").write_text(self._content)

        self._saves.agreement.run("write", write)

        def finish() -> None:
            self._saves.note("finish")

        return finish


_PLANNING = ["header", "plan"]
_ALL = ["settings", "admit", "take", *_PLANNING, "digest", "compare", "write", "finish", "committed"]


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    monkeypatch.setattr(save_job, "_PAUSE_S", 0.0)
    return Saves(tmp_path)


def test_a_directory_appears_after_all_phases_and_has_only_what_was_written(tmp_path: Path, saves: Saves) -> None:
    saves.save(5, "a")
    assert saves.calls == _ALL
    assert {path.name: path.read_text() for path in (tmp_path / "step-5").iterdir()} == {"data": "a"}


@pytest.mark.parametrize(
    ("snapshot", "is_planned_anew"),
    [
        (TakenSnapshot(structure=1, values=1, holder=1), False),
        (TakenSnapshot(structure=1, values=2, holder=1), False),
        (TakenSnapshot(structure=2, values=1, holder=1), True),
        (TakenSnapshot(structure=1, values=1, holder=2), True),
    ],
)
def test_work_is_divided_anew_where_the_structure_or_its_holder_is_another(
    saves: Saves, snapshot: TakenSnapshot, is_planned_anew: bool
) -> None:
    saves.save(1, "a")
    saves.calls.clear()
    saves.snapshot = snapshot
    saves.save(2, "b")
    assert saves.calls == [name for name in _ALL if is_planned_anew or name not in _PLANNING]


@pytest.mark.parametrize("name", _ALL[1:-1])
def test_what_may_pass_is_tried_again_from_the_start(tmp_path: Path, saves: Saves, name: str) -> None:
    saves.failures[name] = [_PASSING]
    saves.save(1, "a")
    assert saves.calls == [*_ALL[: _ALL.index(name) + 1], *_ALL[1:]]
    assert saves.retries[-1]
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(StateMovedError("model.weight changed in place"), StateMovedError), (_PASSING, RankFailedError)],
)
def test_a_snapshot_that_failed_is_not_taken_again(
    tmp_path: Path, saves: Saves, failure: Exception, raised: type[Exception]
) -> None:
    saves.save(1, "a")
    saves.calls.clear()
    saves.failures["settings"] = [failure]
    with pytest.raises(raised, match="rank 0"):
        saves.save(2, "b")
    assert saves.calls == ["settings"]
    assert os.listdir(tmp_path) == ["step-1"]
    saves.calls.clear()
    saves.save(3, "c")
    assert saves.calls == _ALL


@pytest.mark.parametrize(
    ("failures", "num_attempts"), [([_LASTING], 1), ([_PASSING] * 3, 3), ([_PASSING, _LASTING], 2)]
)
def test_what_does_not_pass_leaves_nothing_and_the_next_write_is_planned_anew(
    tmp_path: Path, saves: Saves, failures: list[OSError], num_attempts: int
) -> None:
    saves.save(1, "a")
    saves.failures["write"] = list(failures)
    saves.agreement.about = " of it"
    with pytest.raises(RankFailedError, match="'write of it'"):
        saves.save(2, "b")
    assert saves.calls.count("write") == 1 + num_attempts
    assert os.listdir(tmp_path) == ["step-1"]
    saves.calls.clear()
    saves.save(3, "c")
    assert saves.calls == _ALL
