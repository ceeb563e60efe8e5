"""What another program left in the root: it is loaded, named, and neither replaced nor cleared."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_ranks import Titan, trained
from ranks import run_ranks
from state_equality import exact
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ft_transport import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointStore,
    StoreSettings,
)
from manager import RegistryError, StateManager, StateTornError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def titan(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return Titan(model, optimizer, 100).states()


def manager_of(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **keywords: Any) -> StateManager:
    manager = StateManager(checkpoint_store=CheckpointStore(root), **keywords)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    return manager


@pytest.mark.parametrize("layout", [plain, by_name, titan])
def test_a_run_goes_on_from_what_dcp_saved(
    tmp_path: Path, layout: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(3)
    dcp.save(layout(model, optimizer), checkpoint_id=tmp_path / "step-100", no_dist=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-100").iterdir()}
    own_model, own_optimizer = trained(0)
    manager = manager_of(tmp_path, own_model, own_optimizer, save_every=50)
    resumed = manager.resume()
    assert resumed is not None
    assert resumed.step == manager.current_step() == 100
    assert "step-100" in resumed.source
    assert exact(own_model.state_dict()) == exact(model.state_dict())
    assert exact(own_optimizer.state_dict()) == exact(optimizer.state_dict())
    assert "no digest covers" in caplog.text
    manager.start_step(100)  # divisible, and not saved over
    manager.start_step(150)
    manager.shutdown()
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-100").iterdir()} == before
    again = manager_of(tmp_path, *trained(0))
    later = again.resume()
    assert later is not None
    assert later.step == 150, "the newest one is this package's own"
    again.shutdown()


def test_torchtitans_scheduler_and_counters_are_loaded_under_its_names(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    dcp.save(Titan(model, optimizer, 100).states(), checkpoint_id=tmp_path / "step-100", no_dist=True)
    own_model, own_optimizer = trained(0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(own_optimizer, lambda step: 1 / (1 + step))
    counters = {"step": 0, "ntokens_seen": 0}
    manager = manager_of(tmp_path, own_model, own_optimizer)
    manager.register("lr_scheduler", scheduler)
    manager.register_state_dict_fn("train_state", counters.update, lambda: dict(counters))
    manager.resume()
    manager.shutdown()
    assert counters == {"step": 100, "ntokens_seen": 1000}
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (100, [group["lr"] for group in optimizer.param_groups])


def test_ranks_load_their_parts_of_what_ranks_saved(tmp_path: Path) -> None:
    run_ranks(foreign_ranks.__file__, 2, str(tmp_path), timeout_s=100)


def test_names_that_differ_are_named_on_both_sides_and_nothing_is_loaded(tmp_path: Path) -> None:
    model, _optimizer = trained(1)
    dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    own_model, own_optimizer = trained(2)
    before = exact([own_model.state_dict(), own_optimizer.state_dict()])
    manager = manager_of(tmp_path, own_model, own_optimizer)
    with pytest.raises(
        RegistryError, match=r"model\.0\.weight is missing.*names in the checkpoint are net\.0\.bias.*move that"
    ) as caught:
        manager.resume()
    assert caught.value.keys == ("model", "optimizer")
    assert exact([own_model.state_dict(), own_optimizer.state_dict()]) == before
    manager.start_step(1)
    manager.shutdown()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: state["model"].update({"0.weight": torch.zeros(5, 4)}), r"\[4, 4\] here and torch\.float32\[5"),
        (lambda state: state["model"].update({"0.weight": torch.zeros(4, 4).bfloat16()}), r"torch\.bfloat16\[4, 4\]"),
        (lambda state: state["model"].update({"0.weight": 5}), "a tensor only here"),
        (lambda state: state["optimizer"]["state"].pop(1), "no entry for 0.bias"),
        (lambda state: state["optimizer"]["param_groups"].pop(), r"param_groups\.1\.\* is missing"),
        (lambda state: state["optimizer"]["param_groups"][0]["params"].pop(), "same parameter groups"),
        (lambda state: state["optimizer"]["state"][0].update(a={"b": torch.ones(1)}), "nested"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, change: Callable[[Any], object], expected: str
) -> None:
    model, optimizer = trained(1)
    state = plain(model, optimizer)
    change(state)
    dcp.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    own_model, own_optimizer = trained(2)
    before = exact([own_model.state_dict(), own_optimizer.state_dict()])
    manager = manager_of(tmp_path, own_model, own_optimizer)
    with pytest.raises(RegistryError, match=expected):
        manager.resume()
    assert exact([own_model.state_dict(), own_optimizer.state_dict()]) == before
    manager.shutdown()


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code ran')",))


def test_no_file_runs_code(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    manager = manager_of(tmp_path, model, optimizer)
    manager.register_state_dict_fn("extra", lambda _: None, lambda: 0)
    dcp.save({**plain(model, optimizer), "extra": Harmful()}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    with pytest.raises(CheckpointError, match=r"expected a value of torch's or Python's own types.*extra"):
        manager.resume()
    for harmful in (Harmful(), b"no pickle"):
        (tmp_path / "step-3" / ".metadata").write_bytes(pickle.dumps(harmful))
        with pytest.raises(CheckpointError, match=r"expected DCP's metadata in .*step-3"):
            manager.resume()
    manager.start_step(1)
    manager.shutdown()


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x03", b"p67108863\n"])
def test_a_few_bytes_make_nobody_allocate_a_gigabyte(tmp_path: Path, put: bytes) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / ".metadata").write_bytes(b"N" + put + b".")
    manager = manager_of(tmp_path, *trained(1))
    with pytest.raises(CheckpointError, match=r"the length of the pickle, got 67108863"):
        manager.resume()
    manager.shutdown()


def test_a_damaged_file_leaves_a_replica_that_refuses_to_step(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    dcp.save(plain(model, optimizer), checkpoint_id=tmp_path / "step-3", no_dist=True)
    (data,) = (tmp_path / "step-3").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-400])
    manager = manager_of(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="DCP's reader"):
        manager.resume()
    with pytest.raises(StateTornError):
        manager.start_step(1)
    manager.shutdown()


def test_with_a_token_an_unsigned_checkpoint_is_loaded_where_that_is_accepted(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    dcp.save(plain(model, optimizer), checkpoint_id=tmp_path / "step-3", no_dist=True)
    for accepted in (False, True):
        settings = StoreSettings(token="0123456789abcdef0123456789abcdef", accept_unsigned=accepted)
        manager = StateManager(checkpoint_store=CheckpointStore(tmp_path, settings=settings))
        manager.register("model", model)
        if accepted:
            assert manager.resume() is not None
        else:
            with pytest.raises(CheckpointError, match=r"signed with the job token, but another program wrote .*step-3"):
                manager.resume()
        manager.shutdown()


def test_a_store_without_a_manager_names_it(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "step-9", no_dist=True)
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, wait=True)
        assert store.steps() == (1,)
        for load in (store.load, store.load_newest_good):
            with pytest.raises(
                CheckpointError, match=r"another program wrote .*step-9 with torch\.distributed\.checkpoint.*dcp\.load"
            ):
                load()
        assert store.load(1).step == 1
        store.save(10, state, wait=True)
        assert store.load().step == 10


@pytest.mark.parametrize("content", ["DCP", "a file", "a link", "model.pt"])
def test_what_another_program_wrote_is_never_replaced_or_cleared(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step-2"
    if content == "DCP":
        dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    elif content == "a file":
        path.write_text("mine")
    elif content == "a link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "model.pt").write_text("mine")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
        (path / content).write_text("mine")
    with CheckpointStore(tmp_path) as store:
        assert "step-2 was written by another program" in caplog.text
        store.save(1, {"w": torch.zeros(3)}, wait=True)
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError, match=r"step-2 contains files of another program.*move"):
                store.save(2, {"w": torch.zeros(3)}, overwrite=overwrite)
        assert store.prune(1) == ()
    with pytest.raises(CheckpointExistsError, match=r"another program wrote step-2; nothing was cleared"):
        CheckpointStore(tmp_path, existing="clear")
    with pytest.raises(CheckpointExistsError, match=r"there are \[1, 2\]"):
        CheckpointStore(tmp_path, existing="refuse")
    assert path.exists()
    assert (tmp_path / "step-1" / "manifest.json").exists()


def test_what_an_interrupted_save_of_dcp_left_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "__0_0.distcp").write_bytes(b"torn")
    with CheckpointStore(tmp_path) as store:
        store.save(2, {"w": torch.zeros(3)}, wait=True)
        assert store.steps() == (2,)


def test_a_manager_that_did_not_resume_is_refused_at_the_first_step_that_would_be_replaced(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    manager = manager_of(tmp_path, *trained(0), save_every=1)
    manager.start_step(1)
    with pytest.raises(CheckpointExistsError, match="step-2"):
        manager.start_step(2)
    manager.shutdown()
