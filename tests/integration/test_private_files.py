"""Who may read what is written: its owner alone where that was asked for, and else whom the umask lets."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_transport import CheckpointStore, ConfigurationError, DeltaDirectory, Publisher, StoreSettings

_OTHERS = 0o077


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes_below(root: Path) -> dict[str, int]:
    below = {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}
    return {".": stat.S_IMODE(root.stat().st_mode), **below}


def save(root: Path, **settings: Any) -> dict[str, int]:
    with CheckpointStore(
        root, consolidate="model", settings=StoreSettings(timeout=timedelta(seconds=30), **settings)
    ) as store:
        store.save(1, {"model": {"w": torch.ones(5)}}, wait=True)
        assert store.load().step == 1
    return modes_below(root)


def publish(root: Path, **keywords: Any) -> dict[str, int]:
    with Publisher([], root, **keywords) as publisher:
        publisher.publish(1, {"w": torch.ones(5)}, files={"config.json": "{}"}).result()
    return modes_below(root)


def restore(root: Path, *, private: bool) -> dict[str, int]:
    root.mkdir(mode=0o700)
    deltas = DeltaDirectory(root / "bucket", private=private)
    with Publisher([deltas], root.with_name("versions")) as publisher:
        publisher.publish(1, {"w": torch.ones(5)}, files={"config.json": "{}"}).result()
    deltas.restore(root / "local")
    return modes_below(root)


@pytest.mark.parametrize("write", [save, publish, restore])
def test_what_is_private_is_its_owner_s_alone(tmp_path: Path, write: Any) -> None:
    with umask(0):
        modes = write(tmp_path / "root", private=True)
    assert len(modes) > 4
    assert {name: oct(mode) for name, mode in modes.items() if mode & _OTHERS} == {}


@pytest.mark.parametrize("write", [save, publish])
@pytest.mark.parametrize("mask", [0o027, 0o002])
def test_else_the_umask_says_who_may_read(tmp_path: Path, write: Any, mask: int) -> None:
    with umask(mask):
        modes = write(tmp_path / "root")
    owner = modes.pop(".owner")
    assert owner & _OTHERS == 0, "what may be read may be locked"
    for name, mode in modes.items():
        whole = 0o777 if (tmp_path / "root" / name).is_dir() else 0o666 if write is save else 0o444
        assert (name, oct(mode)) == (name, oct(whole & ~mask))


def test_a_setting_that_is_no_truth_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="private"):
        StoreSettings(private=0o600)  # type: ignore[arg-type]
