"""Which failures of reading are tried again, for how long, and which are damage."""

from __future__ import annotations

import errno
import os

import pytest

from ft_transport.checkpoint.stored_files import ReadRetries
from ft_transport.errors import CheckpointDamagedError, RankGoneError
from ft_transport.runtime.regular_files import UnusableFileError

_PASSING = (
    errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EINTR, errno.EAGAIN, errno.ENOMEM,
    errno.ETIMEDOUT, errno.EIO,
)  # fmt: skip


class Failing:
    """Raises the same so many times, and then returns."""

    def __init__(self, error: Exception, num_times: int) -> None:
        self.error = error
        self.left = num_times
        self.num_calls = 0

    def __call__(self) -> str:
        self.num_calls += 1
        if self.left > 0:
            self.left -= 1
            raise self.error
        return "read"


def of(number: int) -> OSError:
    return OSError(number, os.strerror(number), "file")


@pytest.mark.parametrize("number", _PASSING)
def test_what_may_pass_is_tried_again_and_raised_in_time(number: int) -> None:
    pauses: list[float] = []
    assert ReadRetries(10, pauses.append).read("file", Failing(of(number), 3)) == "read"
    assert pauses == sorted(pauses)
    assert len(pauses) == 3
    pauses.clear()
    action = Failing(of(number), 1 << 30)
    kind = CheckpointDamagedError if number == errno.EIO else OSError
    with pytest.raises(kind) as caught:
        ReadRetries(3, pauses.append).read("file", action)
    assert sum(pauses) == pytest.approx(3)
    if isinstance(caught.value, CheckpointDamagedError):
        assert caught.value.files == ("file",)
    else:
        assert caught.value is action.error


@pytest.mark.parametrize(
    "error",
    [of(errno.ENOENT), of(errno.ENOTDIR), UnusableFileError(errno.EINVAL, "x")],
)
def test_what_is_not_there_is_damage_at_once(error: OSError) -> None:
    action = Failing(error, 1 << 30)
    with pytest.raises(CheckpointDamagedError, match="file: cannot be read"):
        ReadRetries(3, pytest.fail).read("file", action)
    assert action.num_calls == 1


@pytest.mark.parametrize("error", [RankGoneError("expected"), CheckpointDamagedError("expected"), ValueError()])
def test_what_is_no_trouble_of_reading_is_raised_as_it_is(error: Exception) -> None:
    action = Failing(error, 1)
    with pytest.raises(type(error)) as caught:
        ReadRetries(3, pytest.fail).read("file", action)
    assert caught.value is error


def test_all_who_use_it_have_so_much_time_together() -> None:
    pauses: list[float] = []
    retries = ReadRetries(1, pauses.append)
    for _ in range(20):
        with pytest.raises(OSError, match="file"):
            retries.call(Failing(of(errno.EMFILE), 1 << 30))
    assert sum(pauses) == pytest.approx(1)
    assert ReadRetries(0).call(lambda: "read") == "read"
