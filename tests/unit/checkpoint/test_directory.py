"""The directory of checkpoints: which names count, who may write, and what is left after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_transport.checkpoint import directory as module
from ft_transport.checkpoint.directory import MANIFEST_NAME, CheckpointDirectory
from ft_transport.errors import CheckpointExistsError, CheckpointNotFoundError

_MARKER = ".set-up"


def make(path: Path, content: str, *, is_complete: bool = True) -> None:
    path.mkdir(parents=True)
    (path / "data").write_text(content)
    if is_complete:
        (path / MANIFEST_NAME).write_text(content)


def save(directory: CheckpointDirectory, step: int, content: str, *, overwrite: bool = False) -> Path:
    path = directory.begin(step, _MARKER, overwrite=overwrite)
    assert (path / _MARKER).exists()
    (path / "data").write_text(content)
    (path / MANIFEST_NAME).write_text(content)
    return directory.commit(step, _MARKER)


def contents(directory: CheckpointDirectory) -> dict[int, str]:
    return {step: (directory.path_of(step) / "data").read_text() for step in directory.steps()}


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointDirectory:
    if not request.param:
        monkeypatch.setattr(module, "_exchange", lambda _first, _second: False)
    return CheckpointDirectory(tmp_path / "deep" / "root")


def test_steps_are_complete_directories_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("step-2", "step-10", "step-0", "step-3.replaced"):
        make(tmp_path / name, name)
    for name in (
        "step-4.incomplete", "step-5.deleted", "step-5.deleted-1", "step-06", "step-", "step--1", "step-7.other",
        "step-8 ", "Step-9", "step-1e3", "xstep-1", "step-11.incomplete.deleted",
    ):  # fmt: skip
        make(tmp_path / name, name)
    make(tmp_path / "step-12", "no manifest", is_complete=False)
    (tmp_path / "step-13").write_text("a file")
    assert CheckpointDirectory(tmp_path).steps() == [0, 2, 3, 10]


def test_where_there_is_no_root_there_are_no_steps(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "none")
    assert directory.steps() == []
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointNotFoundError, match="there are none"):
        directory.path_of(1)


def test_a_checkpoint_appears_when_it_is_committed(directory: CheckpointDirectory) -> None:
    path = directory.begin(1, _MARKER, overwrite=False)
    (path / MANIFEST_NAME).write_text("complete, and not yet committed")
    assert directory.steps() == []
    final = directory.commit(1, _MARKER)
    assert (final.name, directory.steps()) == ("step-1", [1])
    assert names_in(final) == {MANIFEST_NAME}
    assert names_in(directory.root) == {"step-1"}


def test_one_that_is_there_is_replaced_only_if_that_is_wanted(directory: CheckpointDirectory) -> None:
    save(directory, 1, "old")
    with pytest.raises(CheckpointExistsError) as caught:
        directory.begin(1, _MARKER, overwrite=False)
    assert caught.value.step == 1
    assert contents(directory) == {1: "old"}
    save(directory, 1, "new", overwrite=True)
    assert contents(directory) == {1: "new"}
    assert names_in(directory.root) == {"step-1"}


def test_until_it_is_committed_the_old_one_stays(directory: CheckpointDirectory) -> None:
    save(directory, 1, "old")
    directory.begin(1, _MARKER, overwrite=True)
    assert contents(directory) == {1: "old"}
    directory.discard(1)
    assert contents(directory) == {1: "old"}
    assert names_in(directory.root) == {"step-1"}
    directory.discard(1)


def test_what_an_earlier_attempt_has_left_is_not_built_upon(directory: CheckpointDirectory) -> None:
    first = directory.begin(1, "first", overwrite=False)
    (first / "data").write_text("of the first attempt")
    second = directory.begin(1, "second", overwrite=False)
    assert names_in(second) == {"second"}


def test_one_without_its_list_of_files_may_be_replaced(directory: CheckpointDirectory) -> None:
    make(directory.root / "step-1", "damaged", is_complete=False)
    save(directory, 1, "new")
    assert contents(directory) == {1: "new"}
    assert names_in(directory.root) == {"step-1"}


@pytest.mark.parametrize(
    ("before", "after", "cleared"),
    [
        ({"step-1": "a"}, {1: "a"}, set()),
        ({"step-1": "a", "step-2.incomplete": "b"}, {1: "a"}, {"step-2.incomplete"}),
        ({"step-1": "a", "step-1.incomplete": "b"}, {1: "a"}, {"step-1.incomplete"}),
        ({"step-1.replaced": "a", "step-1.incomplete": "b"}, {1: "a"}, {"step-1.incomplete"}),
        ({"step-1.replaced": "a", "step-1": "b"}, {1: "b"}, {"step-1.replaced"}),
        ({"step-1.deleted": "a", "step-1.deleted-1": "b"}, {}, {"step-1.deleted", "step-1.deleted-1"}),
        ({"step-1.deleted": "a", "step-2": "c"}, {2: "c"}, {"step-1.deleted"}),
        ({"step-1.deleted": "a", "step-1.incomplete": "b"}, {}, {"step-1.deleted", "step-1.incomplete"}),
        ({"step-1.replaced": "a"}, {1: "a"}, set()),
    ],
)  # fmt: skip
def test_recovering_clears_what_was_interrupted(
    tmp_path: Path, before: dict[str, str], after: dict[int, str], cleared: set[str]
) -> None:
    for name, content in before.items():
        make(tmp_path / name, content)
    (tmp_path / "of somebody else").mkdir()
    directory = CheckpointDirectory(tmp_path)
    # A reader, which clears nothing, sees the same.
    assert contents(directory) == after
    assert set(directory.recover()) == cleared
    assert contents(directory) == after
    assert names_in(tmp_path) == {"of somebody else", *(f"step-{step}" for step in after)}
    assert directory.recover() == []


def test_one_that_was_about_to_be_replaced_comes_back_in_place_of_a_torn_one(tmp_path: Path) -> None:
    make(tmp_path / "step-1.replaced", "whole")
    make(tmp_path / "step-1", "torn", is_complete=False)
    directory = CheckpointDirectory(tmp_path)
    directory.recover()
    assert contents(directory) == {1: "whole"}
    assert names_in(tmp_path) == {"step-1"}


def test_removing_and_clearing(directory: CheckpointDirectory) -> None:
    for step in (1, 2, 3):
        save(directory, step, str(step))
    make(directory.root / "step-2.replaced", "older")
    make(directory.root / "step-9.incomplete", "torn")
    retired = directory.retire(2)
    assert contents(directory) == {1: "1", 3: "3"}
    assert names_in(directory.root) >= {"step-2.deleted", "step-2.deleted-1"} == {path.name for path in retired}
    for _ in range(2):
        directory.delete(retired)
    assert directory.retire(2) == []
    assert names_in(directory.root) == {"step-1", "step-3", "step-9.incomplete"}
    directory.clear()
    assert names_in(directory.root) == set()


def test_a_name_of_what_is_being_deleted_is_not_taken_twice(directory: CheckpointDirectory) -> None:
    """A deletion that was interrupted, and then the same step again."""
    make(directory.root / "step-1.deleted", "torn", is_complete=False)
    save(directory, 1, "a")
    directory.delete(directory.retire(1))
    assert directory.steps() == []
    assert names_in(directory.root) == {"step-1.deleted"}


def test_exchanging_two_names_is_told_from_not_being_able_to(tmp_path: Path) -> None:
    make(tmp_path / "a", "a")
    make(tmp_path / "b", "b")
    if not module._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert ((tmp_path / "a" / "data").read_text(), (tmp_path / "b" / "data").read_text()) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        module._exchange(tmp_path / "a", tmp_path / "none")
