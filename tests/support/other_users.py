"""Acting as another user: a test that runs as root takes another user's rights for a while."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root's rights to act as another user")


@contextmanager
def acting_as(user: int = NOBODY) -> Iterator[None]:
    """What is done inside, on any thread, is done with the rights of a user who has none of root's."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user may read, and get to; those of a test are its user's alone."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)
