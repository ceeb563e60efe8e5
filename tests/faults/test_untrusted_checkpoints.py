"""With a job token, a checkpoint that the token has not signed is not loaded, however well its files fit together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forged_checkpoints import forge_file, forge_manifest

from ft_transport import (
    CheckpointDamagedError,
    CheckpointStore,
    CheckpointUntrustedError,
    StoreSettings,
)
from ft_transport.checkpoint.manifest import CHECKSUM, FORMAT_VERSIONS, MANIFEST_NAME, CheckpointManifest
from ft_transport.coordination.ranks import RankGroup
from ft_transport.credentials import TOKEN_VARIABLE, Keys

_DATA = "__0_0.distcp"
_TOKEN, _OTHER = "the-token-of-this-job", "the-token-of-another-job"


def settings(token: str | None = _TOKEN, **more: Any) -> StoreSettings:
    return StoreSettings(timeout=timedelta(seconds=30), token=token, **more)


def state(value: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(value))}, "random": torch.full((3,), float(value))}


def save(root: Path, steps: tuple[int, ...], **keywords: Any) -> Path:
    """Saves steps, each with its number in every value."""
    with CheckpointStore(root, rank_local=("random",), consolidate="model", settings=settings(**keywords)) as store:
        for step in steps:
            store.save(step, state(step), wait=True)
    return root


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("template") / "root", (1, 2))


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "root"))


def reading(root: Path, **keywords: Any) -> CheckpointStore:
    return CheckpointStore(root, rank_local=("random",), read_only=True, settings=settings(**keywords))


def expect_loaded(root: Path, step: int = 2, **keywords: Any) -> None:
    with reading(root, **keywords) as store:
        store.verify(step)
        into = state(-1)
        assert store.load(step, into=into).step == step
        assert torch.equal(into["model"]["w"], state(step)["model"]["w"])


def expect_refused(root: Path, match: str, **keywords: Any) -> None:
    """It is neither verified nor loaded, and no older one is taken for the newest without a word."""
    into = state(-1)
    with reading(root, **keywords) as store:
        looks: list[Callable[[], object]] = [
            lambda: store.verify(2),
            lambda: store.load(2, into=into),
            lambda: store.load_newest_good(into=into),
        ]
        for look in looks:
            with pytest.raises(CheckpointUntrustedError, match=match):
                look()
    assert torch.equal(into["model"]["w"], state(-1)["model"]["w"])


def test_what_the_token_has_signed_is_loaded(root: Path) -> None:
    expect_loaded(root)
    listed = json.loads((root / "step-2" / MANIFEST_NAME).read_text())
    assert _TOKEN not in json.dumps(listed)
    assert listed["body"]["format"] == 4
    digests = {each["name"]: each["digests"] for each in listed["body"]["files"]}
    assert {len(each) for each in digests.values()} == {64}
    assert "model.safetensors.index.json" in digests


def test_a_forged_file_is_refused_although_its_list_fits(root: Path) -> None:
    def change(content: bytearray) -> None:
        at = content.index(state(2)["model"]["w"].numpy().tobytes())
        content[at : at + 4] = b"evil"

    forge_file(root / "step-2", _DATA, change)
    expect_refused(root, "signed with key .* the content has changed")
    # Without a token nothing shows that it was forged.
    with reading(root, token=None) as store:
        assert store.load(2).state["model"]["w"][0] != 2


def test_a_forged_file_whose_list_was_left_is_damaged(root: Path) -> None:
    path = root / "step-2" / _DATA
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with reading(root) as store:
        with pytest.raises(CheckpointDamagedError):
            store.verify(2)
        loaded = store.load_newest_good()
        assert loaded is not None


def test_the_list_of_another_step_is_refused(root: Path) -> None:
    """A whole, signed checkpoint under the name of a newer one, and with its step changed in the list."""
    shutil.rmtree(root / "step-2")
    shutil.copytree(root / "step-1", root / "step-2")
    with reading(root) as store, pytest.raises(CheckpointDamagedError, match="expected the list of step 2"):
        store.load(2)
    forge_manifest(root / "step-2", lambda manifest: msgspec.structs.replace(manifest, step=2))
    expect_refused(root, "the content has changed")


def test_the_list_of_another_directory_is_refused_with_these_files(root: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", (2,))
    with CheckpointStore(other, rank_local=("random",), settings=settings()) as store:
        store.save(2, state(7), wait=True, overwrite=True)
    shutil.copyfile(other / "step-2" / MANIFEST_NAME, root / "step-2" / MANIFEST_NAME)
    with reading(root) as store, pytest.raises(CheckpointDamagedError):
        store.load(2)


def test_a_checkpoint_of_another_job_is_refused(root: Path, tmp_path: Path) -> None:
    expect_refused(root, "for the job 'mine', it is signed for ''", job="mine")
    mine = save(tmp_path / "mine", (2,), job="mine")
    expect_loaded(mine, job="mine")
    expect_refused(mine, "for the job 'theirs', it is signed for 'mine'", job="theirs")


def test_another_token_is_named_by_its_id(root: Path) -> None:
    expect_refused(root, "the keys here are", token=_OTHER)


def test_a_token_that_is_being_replaced_loads_what_either_has_signed(root: Path) -> None:
    expect_loaded(root, token=f"{_OTHER} {_TOKEN}")


def test_without_a_signature_it_is_refused_unless_that_is_accepted(tmp_path: Path) -> None:
    root = save(tmp_path / "root", (1, 2), token=None)
    assert json.loads((root / "step-2" / MANIFEST_NAME).read_text())["body"]["format"] == 3
    expect_loaded(root, token=None)
    expect_refused(root, "no signature.*accept_unsigned=True")
    expect_loaded(root, accept_unsigned=True)


@pytest.mark.parametrize("is_secure", [True, False])
def test_taking_the_signature_away_is_refused(root: Path, is_secure: bool) -> None:
    """With the digests as they are, or with those of a checkpoint that nobody has ever signed."""
    path = root / "step-2" / MANIFEST_NAME
    if not is_secure:
        forge_manifest(root / "step-2", _with_checksums)
    sealed = json.loads(path.read_text())
    del sealed["signature"]
    path.write_text(json.dumps(sealed, separators=(",", ":")))
    expect_refused(root, "no signature")


def test_a_wrong_signature_is_refused_where_none_is_accepted(root: Path) -> None:
    path = root / "step-2" / MANIFEST_NAME
    text = path.read_text()
    for signature in ("x", "\u0131" * 80, f"{'0' * 16}:{'0' * 64}", json.loads(text)["signature"][:-1] + "g"):
        sealed = json.loads(text)
        sealed["signature"] = signature
        path.write_text(json.dumps(sealed, separators=(",", ":"), ensure_ascii=False))
        expect_refused(root, "signed with key", accept_unsigned=True)


def _with_checksums(manifest: CheckpointManifest) -> CheckpointManifest:
    files = tuple(msgspec.structs.replace(each, digests=each.digests[::4]) for each in manifest.files)
    return msgspec.structs.replace(manifest, files=files, hash=CHECKSUM, format=FORMAT_VERSIONS[CHECKSUM])


def test_the_token_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", _TOKEN)
    root = save(tmp_path / "root", (2,), token=None)
    expect_loaded(root, token=_TOKEN)
    monkeypatch.delenv("FT_TRANSPORT_TOKEN")
    expect_refused(root, "the keys here are", token=_OTHER)


def test_the_token_that_signs_checkpoints_signs_what_ranks_agree_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment has none: who writes to the ranks' store could choose for all of them what is loaded."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    given: list[Keys | None] = []

    def of(_group: object, *, keys: Keys | None = None) -> RankGroup:
        given.append(keys)
        return RankGroup()

    monkeypatch.setattr(RankGroup, "of", of)
    with reading(root):
        [keys] = given
        assert keys is not None
        assert Keys.of(_TOKEN).verifies(keys.sign("vote"), "vote")


def test_pruning_takes_what_is_not_signed_for_no_good_one(root: Path) -> None:
    def change(content: bytearray) -> None:
        content[-1] ^= 1

    forge_file(root / "step-2", _DATA, change)
    with CheckpointStore(root, rank_local=("random",), settings=settings()) as store:
        assert store.prune(1) == ()
        assert store.steps() == (1, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_what_is_signed(root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    into = {"model": {"w": torch.zeros(1000)}}
    dcp.load(into, checkpoint_id=root / "step-2", no_dist=True)
    assert torch.equal(into["model"]["w"], state(2)["model"]["w"])
