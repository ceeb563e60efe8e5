"""Checkpoints that were made to mislead, by who may write to the directory: each is refused by what it says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forged_checkpoints import forge_json, forge_manifest, relist
from odd_files import put_directory, put_fifo, put_socket

from ft_transport import CheckpointDamagedError, CheckpointStore, StoreSettings
from ft_transport.checkpoint.manifest import CHUNK_BYTES, CheckpointManifest, FileEntry

_SETTINGS = StoreSettings(timeout=timedelta(seconds=30))
_RANK, _DATA, _METADATA = "rank-0.json", "__0_0.distcp", ".metadata"


def state(value: int) -> dict[str, Any]:
    return {
        "w": torch.full((CHUNK_BYTES // 4,), float(value)),
        "v": torch.full((CHUNK_BYTES // 4,), float(value)),
        "random": torch.full((9,), float(value)),
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "root"
    with CheckpointStore(root, rank_local=("random",), settings=_SETTINGS) as store:
        for step in (1, 2):
            store.save(step, state(step), wait=True)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "root"))


@pytest.fixture
def store(root: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(root, rank_local=("random",), read_only=True, settings=_SETTINGS) as made:
        yield made


def expect_refused(store: CheckpointStore, match: str) -> None:
    """Both ways of looking at it name what is wrong, nothing of it is loaded, and the one before is."""
    for look in (store.verify, store.load, lambda step: store.load(step, into=state(-1))):
        with pytest.raises(CheckpointDamagedError, match=match):
            look(2)
    into = state(-1)
    with pytest.raises(CheckpointDamagedError, match=match):
        store.load(2, into=into)
    assert all(torch.equal(each, state(-1)[name]) for name, each in into.items())
    loaded = store.load_newest_good(into=into)
    assert loaded is not None
    assert loaded.step == 1
    assert all(torch.equal(each, state(1)[name]) for name, each in into.items())


@pytest.mark.parametrize("part", [0, 1], ids=["what all ranks share", "what a rank has for itself"])
@pytest.mark.parametrize("position", [1 << 24, 1 << 40, 1 << 62, -(1 << 20), "a byte too far"])
def test_a_position_outside_of_its_file(root: Path, store: CheckpointStore, part: int, position: int | str) -> None:
    num_bytes = state(0)["random" if part else "w"].nbytes
    at = position if isinstance(position, int) else (root / "step-2" / _DATA).stat().st_size - num_bytes + 1

    def move(described: Any) -> None:
        described["parts"][part]["positions"][0] = at

    forge_json(root / "step-2", _RANK, move)
    expect_refused(store, r"rank-0\.json")


def test_a_position_that_leads_into_the_file_of_another_rank(tmp_path: Path) -> None:
    """Chunks are numbered through all files, so that behind the last one of a file come whole bytes of the next."""
    with CheckpointStore(tmp_path, settings=_SETTINGS) as store:
        store.save(2, {"w": torch.ones(1000)}, wait=True)
    directory = tmp_path / "step-2"
    for name, other in ((_DATA, "__1_0.distcp"), (_RANK, "rank-1.json")):
        shutil.copyfile(directory / name, directory / other)

    def add_rank(manifest: CheckpointManifest) -> CheckpointManifest:
        others = [FileEntry(name, 0, "") for name in ("__1_0.distcp", "rank-1.json")]
        return msgspec.structs.replace(manifest, num_ranks=2, files=(*manifest.files, *others))

    forge_manifest(directory, add_rank)
    relist(directory, "__1_0.distcp")
    forge_json(directory, "rank-1.json", lambda it: it.update(data_files=["__1_0.distcp"]))
    with CheckpointStore(tmp_path, read_only=True, settings=_SETTINGS) as store:
        assert store.load(2).state["w"].tolist() == [1] * 1000
        forge_json(directory, "rank-1.json", lambda it: it["parts"][0].update(positions=[-1]))
        forge_json(directory, _RANK, lambda it: it["parts"][0].update(positions=[CHUNK_BYTES]))
        for look in (store.verify, store.load, lambda step: store.load(step, into={"w": torch.zeros(1000)})):
            with pytest.raises(CheckpointDamagedError, match=r"rank-0\.json"):
                look(2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param(lambda it: it.update(data_files=["__9_0.distcp"]), "expected a data file", id="another file"),
        pytest.param(lambda it: it.update(data_files=["../../etc/passwd"]), "expected a data file", id="elsewhere"),
        pytest.param(lambda it: it.update(data_files=[]), "expected a data file", id="no file"),
        pytest.param(lambda it: it["parts"][0].update(files=[0, 1]), "data files, got number 1", id="one too many"),
        pytest.param(lambda it: it["parts"][0].update(files=[0, -1]), "data files, got number -1", id="one before"),
        pytest.param(
            lambda it: it["parts"][1].update(positions=[-1], files=[10**9]), "data files, got number 10", id="unused"
        ),
        pytest.param(lambda it: it.update(data_files=2 * it["data_files"]), "each data file once", id="twice"),
        pytest.param(lambda it: it["parts"][0].update(files=[0]), "a data file for each", id="a file less"),
        pytest.param(lambda it: it.update(parts=[]), "expected 2 parts", id="no parts"),
        pytest.param(lambda it: it["parts"].pop(), "expected 2 parts", id="a part less"),
        pytest.param(lambda it: it["parts"][0].update(header={}), "snapshot", id="no header"),
        pytest.param(lambda it: it["parts"][0]["positions"].pop(), "position for each", id="a position less"),
    ],
)
def test_a_description_that_contradicts_itself(
    root: Path, store: CheckpointStore, change: Callable[[Any], None], match: str
) -> None:
    forge_json(root / "step-2", _RANK, change)
    expect_refused(store, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"name": ".."}, "expected a list of files"),
        ({"name": "x\n"}, "expected a list of files"),
        ({"name": "a/b"}, "expected a list of files"),
        ({"name": "x" * 300}, "expected a list of files"),
        ({"digests": ""}, "a digest of each chunk"),
        ({"digests": "0" * 16 * 3}, None),
        ({"digests": " " * 16 * 3}, "expected a list of files"),
        ({"num_bytes": 1 << 60}, "a digest of each chunk"),
        ({"name": _RANK}, "each file once"),
    ],
)
def test_a_list_of_files_that_says_what_cannot_be(
    root: Path, store: CheckpointStore, changes: dict[str, Any], match: str | None
) -> None:
    def change(manifest: CheckpointManifest) -> CheckpointManifest:
        files = [msgspec.structs.replace(each, **changes) if each.name == _DATA else each for each in manifest.files]
        return msgspec.structs.replace(manifest, files=tuple(files))

    forge_manifest(root / "step-2", change)
    if match is None:
        with pytest.raises(CheckpointDamagedError):
            store.load(2)
    else:
        expect_refused(store, match)


def test_more_ranks_than_there_are_files(root: Path, store: CheckpointStore) -> None:
    forge_manifest(root / "step-2", lambda manifest: msgspec.structs.replace(manifest, num_ranks=1 << 62))
    expect_refused(store, r"an entry for rank-1\.json")


def put_link(path: Path) -> None:
    os.symlink(path.parent.parent / "step-1" / path.name, path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [_RANK, _DATA, _METADATA])
@pytest.mark.parametrize("put", [put_fifo, put_socket, put_link, put_directory])
def test_something_else_than_a_file_is_refused_at_once(
    root: Path, store: CheckpointStore, name: str, put: Callable[[Path], None]
) -> None:
    path = root / "step-2" / name
    path.unlink()
    put(path)
    expect_refused(store, "regular file")
