"""Numbered directories: which names count, how one is replaced, and what is left after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_transport.checkpoint import directory as module
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.manifest import MANIFEST_NAME
from ft_transport.errors import CheckpointExistsError


def checkpoints(root: Path) -> NumberedDirectory:
    return NumberedDirectory(root, "step", MANIFEST_NAME)


def make(path: Path, content: str, *, is_complete: bool = True) -> None:
    path.mkdir(parents=True)
    (path / "data").write_text(content)
    (path / "rank-0.json").write_text("")
    if is_complete:
        (path / MANIFEST_NAME).write_text(content)


def save(directory: NumberedDirectory, step: int, content: str) -> Path:
    path = directory.begin(step)
    assert names_in(path) == set()
    (path / "data").write_text(content)
    (path / MANIFEST_NAME).write_text(content)
    return directory.commit(step)


def contents(directory: NumberedDirectory) -> dict[int, str]:
    paths = {step: directory.find(step) for step in directory.numbers()}
    return {step: (path / "data").read_text() for step, path in paths.items() if path is not None}


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NumberedDirectory:
    if not request.param:
        monkeypatch.setattr(module, "_exchange", lambda _first, _second: False)
    return checkpoints(tmp_path / "deep" / "root")


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
    assert checkpoints(tmp_path).numbers() == [0, 2, 3, 10]


def test_where_there_is_no_root_there_are_no_steps(tmp_path: Path) -> None:
    directory = checkpoints(tmp_path / "none")
    assert directory.numbers() == []
    assert not (tmp_path / "none").exists()
    assert directory.find(1) is None


def test_a_checkpoint_appears_when_it_is_committed(directory: NumberedDirectory) -> None:
    path = directory.begin(1)
    (path / MANIFEST_NAME).write_text("complete, and not yet committed")
    assert directory.numbers() == []
    final = directory.commit(1)
    assert (final.name, directory.numbers()) == ("step-1", [1])
    assert names_in(final) == {MANIFEST_NAME}
    assert names_in(directory.root) == {"step-1"}


def test_until_it_is_committed_the_old_one_stays(directory: NumberedDirectory) -> None:
    save(directory, 1, "old")
    directory.begin(1)
    assert contents(directory) == {1: "old"}
    directory.discard(1)
    assert contents(directory) == {1: "old"}
    assert names_in(directory.root) == {"step-1"}
    directory.discard(1)


def test_what_an_earlier_attempt_has_left_is_not_built_upon(directory: NumberedDirectory) -> None:
    (directory.begin(1) / "data").write_text("of the first attempt")
    assert names_in(directory.begin(1)) == set()


@pytest.mark.parametrize("is_complete", [True, False])
def test_one_that_is_there_is_replaced_also_without_its_list_of_files(
    directory: NumberedDirectory, is_complete: bool
) -> None:
    make(directory.root / "step-1", "old", is_complete=is_complete)
    save(directory, 1, "new")
    assert contents(directory) == {1: "new"}
    assert names_in(directory.root) == {"step-1"}


def test_what_another_program_wrote_is_neither_replaced_nor_deleted(directory: NumberedDirectory) -> None:
    for name in ("step-1", "step-2"):
        (directory.root / name).mkdir(parents=True)
        (directory.root / name / "model.pt").write_text("foreign")
    make(directory.root / "step-1.replaced", "own")
    for action in (directory.recover, directory.clear):
        assert directory.foreign() == {step: directory.root / f"step-{step}" for step in (1, 2)}
        assert directory.find(2) is None
        action()
    with pytest.raises(CheckpointExistsError, match="step-1"):
        directory.refuse_foreign(1)
    directory.refuse_foreign(3)
    assert names_in(directory.root) == {"step-1", "step-2"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"step-1": "a"}, {1: "a"}),
        ({"step-1": "a", "step-2.incomplete": "b"}, {1: "a"}),
        ({"step-1": "a", "step-1.incomplete": "b"}, {1: "a"}),
        ({"step-1.replaced": "a", "step-1.incomplete": "b"}, {1: "a"}),
        ({"step-1.replaced": "a", "step-1": "b"}, {1: "b"}),
        ({"step-1.deleted": "a", "step-1.deleted-1": "b"}, {}),
        ({"step-1.deleted": "a", "step-2": "c"}, {2: "c"}),
        ({"step-1.deleted": "a", "step-1.incomplete": "b"}, {}),
        ({"step-1.replaced": "a"}, {1: "a"}),
        ({"step-1.replaced": "a", "step-1": "torn"}, {1: "a"}),
    ],
)  # fmt: skip
def test_recovering_clears_what_was_interrupted(tmp_path: Path, before: dict[str, str], after: dict[int, str]) -> None:
    for name, content in before.items():
        make(tmp_path / name, content, is_complete=content != "torn")
    (tmp_path / "of somebody else").mkdir()
    directory = checkpoints(tmp_path)
    # A reader, which clears nothing, sees the same.
    assert contents(directory) == after
    directory.recover()
    assert contents(directory) == after
    assert names_in(tmp_path) == {"of somebody else", *(f"step-{step}" for step in after)}


def test_removing_and_clearing(directory: NumberedDirectory) -> None:
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


def test_a_name_of_what_is_being_deleted_is_not_taken_twice(directory: NumberedDirectory) -> None:
    """A deletion that was interrupted, and then the same step again."""
    make(directory.root / "step-1.deleted", "torn", is_complete=False)
    save(directory, 1, "a")
    directory.delete(directory.retire(1))
    assert directory.numbers() == []
    assert names_in(directory.root) == {"step-1.deleted"}


def test_without_a_last_file_a_name_alone_says_that_a_directory_is_complete(tmp_path: Path) -> None:
    for name in ("version-2", "version-10", "version-11.incomplete", "step-12"):
        make(tmp_path / name, name, is_complete=False)
    (tmp_path / "version-13").write_text("a file")
    outside = tmp_path / "outside"
    make(outside, "of somebody else")
    (tmp_path / "version-14.incomplete").symlink_to(outside)
    directory = NumberedDirectory(tmp_path, "version", None)
    directory.recover()
    assert directory.numbers() == [2, 10]
    assert (outside / "data").exists()
    assert not (tmp_path / "version-11.incomplete").exists()


def test_exchanging_two_names_is_told_from_not_being_able_to(tmp_path: Path) -> None:
    make(tmp_path / "a", "a")
    make(tmp_path / "b", "b")
    if not module._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert ((tmp_path / "a" / "data").read_text(), (tmp_path / "b" / "data").read_text()) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        module._exchange(tmp_path / "a", tmp_path / "none")
