"""A checkpoint directory that others may read, or write to: nothing there stops a run, or has it overwrite files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from odd_files import put_directory, put_fifo, put_socket
from other_users import NOBODY, acting_as, as_root, open_directory

from ft_transport import CheckpointStore, ConfigurationError, StoreSettings
from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.directory import MAX_NUMBER, NumberedDirectory
from ft_transport.checkpoint.manifest import MANIFEST_NAME
from ft_transport.errors import CheckpointError, CheckpointInUseError

_OWNER = ".owner"
_SETTINGS = StoreSettings(timeout=timedelta(seconds=30))


@pytest.fixture
def open_root() -> Iterator[Path]:
    with open_directory() as root:
        yield root


class TestTheClaim:
    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_link_in_place_of_it_is_refused_and_what_it_leads_to_stays(self, tmp_path: Path, is_there: bool) -> None:
        root, target = tmp_path / "root", tmp_path / "target"
        if is_there:
            target.write_text("precious")
        root.mkdir()
        (root / _OWNER).symlink_to(target)
        with pytest.raises(CheckpointError, match=r"\.owner is a link"):
            RootClaim(root).take("this one", 0)
        assert target.read_text() == "precious" if is_there else not target.exists()

    def test_another_name_of_a_file_leaves_that_file_as_it_is(self, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.write_text("precious")
        root = tmp_path / "root"
        root.mkdir()
        os.link(target, root / _OWNER)
        claim, other = RootClaim(root), RootClaim(root)
        claim.take("this one", 0)
        assert target.read_text() == "precious"
        with pytest.raises(CheckpointInUseError, match="this one"):
            other.take("another", 0)
        claim.release()
        assert os.listdir(root) == [_OWNER]

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("put", [put_fifo, put_socket, put_directory])
    def test_what_is_no_file_is_refused_at_once(self, tmp_path: Path, put: Callable[[Path], None]) -> None:
        put(tmp_path / _OWNER)
        with pytest.raises(CheckpointError, match=r"\.owner is a link, directory or device"):
            RootClaim(tmp_path).take("this one", 0)

    @as_root
    @pytest.mark.parametrize("mode", [None, 0o644], ids=["new", "made by an earlier release"])
    def test_who_may_only_read_the_directory_cannot_take_the_lock(self, open_root: Path, mode: int | None) -> None:
        root = open_root
        if mode is not None:
            (root / _OWNER).write_text("{}")
            (root / _OWNER).chmod(mode)
        claim = RootClaim(root)
        claim.take("an earlier run", 0)
        claim.release()
        held: int | None = None
        with acting_as():
            try:
                held = os.open(root / _OWNER, os.O_RDONLY)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except PermissionError:
                pass
        try:
            claim.take("this run", 0)
            claim.release()
        finally:
            if held is not None:
                os.close(held)

    @as_root
    def test_another_user_s_claim_is_called_that(self, open_root: Path) -> None:
        root = open_root
        root.chmod(0o777)
        claim = RootClaim(root)
        claim.take("root's", 0)
        claim.release()
        with acting_as(), pytest.raises(CheckpointInUseError, match="belongs to another user"):
            RootClaim(root).take("nobody's", 0)

    def test_a_file_that_was_replaced_is_not_taken_for_the_claim(self, tmp_path: Path) -> None:
        """A lock of a file that is gone keeps nobody out."""
        first, second, third = RootClaim(tmp_path), RootClaim(tmp_path), RootClaim(tmp_path)
        first.take("first", 0)
        (tmp_path / _OWNER).unlink()
        second.take("second", 0)
        first.release()
        with pytest.raises(CheckpointInUseError, match="second"):
            third.take("third", 0)
        second.release()

    def test_what_the_file_says_cannot_disturb_a_terminal(self, tmp_path: Path) -> None:
        claim = RootClaim(tmp_path)
        claim.take("this one", 0)
        (tmp_path / _OWNER).write_bytes(b"\x1b[2J\nwhat looks like a line of its own")
        with pytest.raises(CheckpointInUseError) as caught:
            RootClaim(tmp_path).take("another", 0)
        claim.release()
        assert "\x1b" not in str(caught.value)
        assert "\n" not in str(caught.value)


class TestWhatWasLeftThere:
    """A store opens its root, and saves a step, whatever has the name of something unfinished."""

    @staticmethod
    def expect_all_well(root: Path) -> None:
        for _ in range(2):
            with CheckpointStore(root, settings=_SETTINGS) as store:
                store.save(5, {"w": torch.arange(4)}, wait=True, overwrite=True)
                assert store.steps() == (5,)
                assert store.load(5).state["w"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("name", ["step-5.incomplete", "step-5.deleted", "step-5.replaced"])
    def test_a_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("of somebody else")
        self.expect_all_well(tmp_path)

    @pytest.mark.parametrize("name", ["step-5.incomplete", "step-5.deleted", "step-5.replaced"])
    def test_a_link_whose_target_stays(self, tmp_path: Path, name: str) -> None:
        root, target = tmp_path / "root", tmp_path / "target"
        root.mkdir()
        target.mkdir()
        (target / "data").write_text("precious")
        (root / name).symlink_to(target)
        self.expect_all_well(root)
        assert [path.name for path in target.iterdir()] == ["data"]

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("put", [put_fifo, put_socket])
    def test_what_is_no_file(self, tmp_path: Path, put: Callable[[Path], None]) -> None:
        put(tmp_path / "step-5.incomplete")
        (tmp_path / "step-6").mkdir()
        put(tmp_path / "step-6" / "manifest.json")
        self.expect_all_well(tmp_path)

    @as_root
    @pytest.mark.parametrize("suffix", ["incomplete", "deleted"])
    def test_what_cannot_be_deleted_is_warned_of_and_passed_by(
        self, open_root: Path, suffix: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A directory of another user's, with a file in it; the root is open to both."""
        left = open_root / f"step-5.{suffix}"
        left.mkdir(mode=0o755)
        (left / "data").write_text("of root's")
        os.chown(open_root, NOBODY, NOBODY)
        with acting_as():
            directory = NumberedDirectory(open_root, "step", MANIFEST_NAME)
            for _ in range(2):
                directory.recover()
            path = directory.begin(5)
            (path / MANIFEST_NAME).write_text("whole")
            directory.commit(5)
            assert directory.numbers() == [5]
        assert len(caplog.messages) <= 2  # what is left has another name now, and each is named once
        assert "could not be deleted" in caplog.messages[0]

    @as_root
    def test_what_cannot_be_renamed_stops_that_step_alone(self, open_root: Path) -> None:
        """In a directory like ``/tmp`` nobody renames what is another user's."""
        (open_root / "step-5.incomplete").mkdir()
        os.chmod(open_root, 0o1777)
        with acting_as():
            directory = NumberedDirectory(open_root, "step", MANIFEST_NAME)
            directory.recover()
            with pytest.raises(PermissionError):
                directory.begin(5)
            (directory.begin(6) / MANIFEST_NAME).write_text("whole")
            directory.commit(6)
            assert directory.numbers() == [6]

    def test_clearing_takes_away_what_counts(self, tmp_path: Path) -> None:
        (tmp_path / "step-3").mkdir()
        (tmp_path / "step-4.incomplete").symlink_to(tmp_path)
        directory = NumberedDirectory(tmp_path, "step", MANIFEST_NAME)
        directory.clear()
        assert os.listdir(tmp_path) == []


class TestLargeNumbers:
    def test_a_name_with_more_digits_than_any_step_is_none(self, tmp_path: Path) -> None:
        for digits in (10**20, 10**18, 2**63, 10**200):
            path = tmp_path / f"step-{digits}"
            path.mkdir()
            (path / MANIFEST_NAME).write_text("{}")
        (tmp_path / f"step-{10**30}.incomplete").mkdir()
        with CheckpointStore(tmp_path, settings=_SETTINGS) as store:
            assert store.steps() == ()
            assert store.load_newest_good() is None

    def test_the_largest_one_is_saved_and_found(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, settings=_SETTINGS) as store:
            store.save(MAX_NUMBER, {"w": torch.arange(4)}, wait=True)
            assert store.steps() == (MAX_NUMBER,)
            assert store.load().step == MAX_NUMBER
            for call in (store.load, store.verify, lambda step: store.save(step, {})):
                with pytest.raises(ConfigurationError, match="at most"):
                    call(MAX_NUMBER + 1)
