"""The phases of a collective write, on one rank: their order, what is planned anew, and what a failure leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from ft_transport.checkpoint import collective_write
from ft_transport.checkpoint.collective_write import CollectiveWrite, TakenSnapshot
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import RankFailedError

_TIMEOUT = timedelta(seconds=10)
_PASSING = OSError(errno.EIO, os.strerror(errno.EIO))
_LASTING = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class RecordingStorage:
    """Notes which of its methods are called; each raises the errors that it is given, one for each call."""

    def __init__(self) -> None:
        self.agreement = Agreement(RankGroup.of(None), "test", _TIMEOUT)
        self.calls: list[str] = []
        self.failures: dict[str, list[OSError]] = {}
        self.snapshot = TakenSnapshot(structure=1, values=1, holder=1)
        self.retries: list[bool] = []

    def settings(self, request: str) -> Mapping[str, object]:
        self._note("settings")
        return {"request": request}

    def admit(self, request: str, *, is_retry: bool) -> None:
        self._note("admit")
        self.retries.append(is_retry)

    def take(self, request: str) -> TakenSnapshot:
        self._note("take")
        return self.snapshot

    def header(self) -> bytes:
        self._note("header")
        return b"header"

    def plan(self, request: str, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        self._note("plan")
        assert headers == [b"header"]
        return [RankPlan(items=(0,), compared=(0,))]

    def digest(self, plan: RankPlan) -> bytes:
        self._note("digest")
        return b"digest"

    def compare(self, digests: Sequence[bytes]) -> None:
        self._note("compare")
        assert digests == [b"digest"]

    def write(self, request: str, directory: Path, plan: RankPlan) -> Callable[[], None]:
        def write() -> None:
            self._note("write")
            (directory / "data").write_text(request)

        self.agreement.run("write", write)
        return lambda: self._note("finish")

    def committed(self, request: str) -> None:
        self._note("committed")

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.failures.get(name):
            raise self.failures[name].pop(0)


_PLANNING = ["header", "plan"]
_ALL = ["settings", "admit", "take", *_PLANNING, "digest", "compare", "write", "finish", "committed"]


@pytest.fixture
def storage() -> RecordingStorage:
    return RecordingStorage()


@pytest.fixture
def write(tmp_path: Path, storage: RecordingStorage, monkeypatch: pytest.MonkeyPatch) -> CollectiveWrite[str]:
    monkeypatch.setattr(collective_write, "_FIRST_PAUSE_S", 0.0)
    return CollectiveWrite(
        agreement=storage.agreement,
        directory=NumberedDirectory(tmp_path, "step", None),
        storage=storage,
        visible_s=1.0,
        max_attempts=3,
    )


def test_a_directory_appears_after_all_phases_and_has_only_what_was_written(
    tmp_path: Path, storage: RecordingStorage, write: CollectiveWrite[str]
) -> None:
    assert write.write(5, "a") == tmp_path / "step-5"
    assert storage.calls == _ALL
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
    storage: RecordingStorage, write: CollectiveWrite[str], snapshot: TakenSnapshot, is_planned_anew: bool
) -> None:
    write.write(1, "a")
    storage.calls.clear()
    storage.snapshot = snapshot
    write.write(2, "b")
    assert storage.calls == [name for name in _ALL if is_planned_anew or name not in _PLANNING]


@pytest.mark.parametrize("name", _ALL[:-1])
def test_what_may_pass_is_tried_again_from_the_start(
    tmp_path: Path, storage: RecordingStorage, write: CollectiveWrite[str], name: str
) -> None:
    storage.failures[name] = [_PASSING]
    write.write(1, "a")
    assert storage.calls == [*_ALL[: _ALL.index(name) + 1], *_ALL]
    assert storage.retries[-1]
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    ("failures", "num_attempts"), [([_LASTING], 1), ([_PASSING] * 3, 3), ([_PASSING, _LASTING], 2)]
)
def test_what_does_not_pass_leaves_nothing_and_the_next_write_is_planned_anew(
    tmp_path: Path, storage: RecordingStorage, write: CollectiveWrite[str], failures: list[OSError], num_attempts: int
) -> None:
    write.write(1, "a")
    storage.failures["write"] = list(failures)
    storage.agreement.about = " of it"
    with pytest.raises(RankFailedError, match="'write of it'"):
        write.write(2, "b")
    assert storage.calls.count("write") == 1 + num_attempts
    assert os.listdir(tmp_path) == ["step-1"]
    storage.calls.clear()
    write.write(3, "c")
    assert storage.calls == _ALL
