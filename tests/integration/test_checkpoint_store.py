"""A store of one process: what users do with it, one behaviour at a time."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run
from state_equality import exact
from torch import nn
from transport_settings import settings_of

from ft_transport import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointStore,
    ConfigurationError,
    HTTPTransport,
    RankFailedError,
    RestoreError,
    SnapshotError,
    StoreSettings,
)
from ft_transport.checkpoint import inventory
from manager import RegistryError, StateManager

_SETTINGS = StoreSettings(timeout=timedelta(seconds=30))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path, settings=_SETTINGS) as made:
        yield made


def _state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((64, 64), float(value))}, "step": int(value)}


def _damage(root: Path, step: int) -> None:
    path = root / f"step-{step}" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def _no_room() -> dict[str, Any]:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_run_that_was_set_back_keeps_what_it_saves(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=2, settings=_SETTINGS) as store:
        for step in (100, 200, 300):
            store.save(step, _state(step), wait=True)
    with CheckpointStore(tmp_path, settings=_SETTINGS, keep=2) as store:
        assert store.steps() == (200, 300)
        _damage(tmp_path, 300)
        loaded = store.load_newest_good()
        assert loaded is not None
        assert loaded.step == 200
        store.save(250, _state(250), wait=True)
        store.wait()
        assert store.steps() == (200, 250, 300), "a later step of the past that was left is no reason to delete one"
        store.save(260, _state(260), wait=True)
        store.save(270, _state(270), wait=True)
        assert set(store.steps()) >= {260, 270}


def test_top_level_keys_that_are_not_asked_for_are_not_read(store: CheckpointStore) -> None:
    state = {"model": {"weight": torch.rand(1 << 20)}, "optimizer": {"moments": torch.rand(1 << 22)}}
    store.save(1, state, wait=True)
    loaded = store.load(1, into={"model": {"weight": torch.zeros(1 << 20)}})
    assert loaded.state.keys() == {"model"}
    assert torch.equal(loaded.state["model"]["weight"], state["model"]["weight"])
    # Whole chunks are read, and so some of what lies beside.
    assert loaded.num_bytes_read <= (4 << 20) + (8 << 20)


def test_a_step_is_saved_once_unless_it_may_be_replaced(store: CheckpointStore) -> None:
    store.save(5, _state(1), wait=True)
    with pytest.raises(CheckpointExistsError, match="step 5"):
        store.save(5, _state(2), wait=True)
    assert store.load(5).state["step"] == 1
    store.save(5, _state(3), wait=True, overwrite=True)
    assert store.load(5).state["step"] == 3
    assert sorted(os.listdir(store.root)) == [".owner", "step-5"]


def test_existing_checkpoints_are_kept_cleared_or_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, settings=_SETTINGS) as store:
        store.save(1, _state(1), wait=True)
    with CheckpointStore(tmp_path, settings=_SETTINGS) as store:
        assert store.steps() == (1,)
    with pytest.raises(CheckpointExistsError, match=r"there are \[1\]"):
        CheckpointStore(tmp_path, existing="refuse", settings=_SETTINGS)
    with CheckpointStore(tmp_path, existing="clear", settings=_SETTINGS) as store:
        assert store.steps() == ()


def test_a_second_store_is_refused_and_may_read(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_CLAIM_S", 0.2)
    store.save(1, _state(1), wait=True)
    with pytest.raises(CheckpointInUseError, match="another group does"):
        CheckpointStore(store.root, settings=_SETTINGS)
    with CheckpointStore(store.root, read_only=True) as reader:
        assert reader.load().step == 1
        reader.verify(1)
        for refused in (lambda: reader.prune(1), lambda: reader.save(2, _state(2))):
            with pytest.raises(CheckpointError, match="read_only"):
                refused()


def test_a_forked_child_does_not_keep_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_CLAIM_S", 0.2)
    store = CheckpointStore(tmp_path, settings=_SETTINGS)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    store.close()
    try:
        CheckpointStore(tmp_path, settings=_SETTINGS).close()
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *go):
            os.close(descriptor)


def test_a_state_that_is_no_dict_is_refused_in_the_call(store: CheckpointStore) -> None:
    cases: list[dict[str, Any]] = [
        {"state": [1]},
        {"state": lambda: torch.ones(2)},
        {"state": {}, "local": lambda: [1]},
    ]
    for arguments in cases:
        with pytest.raises(CheckpointError, match=r"expected a dict as state, got .*step 1"):
            store.save(1, **arguments)
    assert store.check_health().is_good


def test_what_cannot_be_saved_is_refused_in_the_call_and_the_next_save_succeeds(store: CheckpointStore) -> None:
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    for value in (object(), (x for x in "ab"), cycle):
        with pytest.raises(SnapshotError, match=r"model\.lock.*step 1"):
            store.save(1, {"model": {"weight": torch.ones(3), "lock": value}})
    assert store.check_health().is_good, "nothing was tried in the background"
    store.save(2, _state(2), wait=True)
    assert store.steps() == (2,)


def test_names_that_collide_are_refused_in_the_call_and_the_next_save_succeeds(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"got this path twice .*at a\.b"):
        store.save(1, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    store.save(2, _state(2), wait=True)
    assert store.check_health().is_good


@pytest.mark.parametrize(
    "state", [{"\ud800": torch.ones(3)}, {"\ud800": 3, "m": {"a\udfff": torch.ones(2)}}], ids=ascii
)
def test_keys_may_have_lone_surrogates(store: CheckpointStore, state: dict[str, Any]) -> None:
    store.save(1, state, wait=True)
    store.verify()
    assert exact(store.load().state) == exact(state)


@pytest.mark.parametrize("key", ["\ud800", "a\udfff", 5])
def test_a_key_of_what_a_rank_has_for_itself_is_text(store: CheckpointStore, key: Any) -> None:
    with pytest.raises(CheckpointError, match="lone surrogates"):
        store.save(1, _state(1), local={key: torch.ones(1)})
    assert store.check_health().is_good
    store.save(1, _state(1), wait=True)


def test_the_trainer_is_stopped_after_too_many_failed_saves_in_a_row(tmp_path: Path) -> None:
    settings = StoreSettings(timeout=timedelta(seconds=30), max_failed_saves=1)
    with CheckpointStore(tmp_path, settings=settings) as store:
        for step in (1, 2):
            assert store.save(step, _no_room).exception() is not None
        store.check_health()
        with pytest.raises(CheckpointError, match=r"at most 1 failed saves in a row, got 2.*step 2") as caught:
            store.check_health()
        assert isinstance(caught.value.__cause__, RankFailedError)
        # Who goes on has been told.
        store.save(3, _state(3), wait=True)
        assert store.steps() == (3,)


def test_there_is_nothing_to_load_from_an_empty_root(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is none"):
        store.load()
    with pytest.raises(CheckpointNotFoundError, match="step 7"):
        store.load(7)
    assert (store.load_newest_good(), store.latest(), store.steps()) == (None, None, ())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_empty_tensor_is_one_for_dcp_as_well(store: CheckpointStore) -> None:
    import torch.distributed.checkpoint as dcp

    store.save(1, {"model": {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}}, wait=True)
    state: dict[str, Any] = {"model": {"empty": torch.zeros(0, 3), "scalar": torch.tensor(0.0)}}
    dcp.load(state, checkpoint_id=store.root / "step-1", no_dist=True)
    assert state["model"]["scalar"] == 2.5


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"rank_local": "rng"}, "rank_local"),
        ({"existing": "ask"}, "existing"),
        ({"keep": 0}, "keep"),
    ],
)
def test_arguments_that_cannot_work_are_named(tmp_path: Path, keywords: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        CheckpointStore(tmp_path, **keywords)


@pytest.mark.parametrize("keywords", [{"busy": "later"}, {"read": "twice"}, {"max_failed_saves": -1}, {"timeout": 5}])
def test_settings_that_cannot_work_are_named(keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(keywords))):
        StoreSettings(**keywords)


def test_saves_that_follow_each_other_closely_take_no_places_of_the_transport(tmp_path: Path) -> None:
    transport: HTTPTransport[Any] = HTTPTransport(settings=settings_of(host="127.0.0.1", max_snapshots=2))
    manager = StateManager(
        checkpoint_transport=transport, checkpoint_store=CheckpointStore(tmp_path, settings=_SETTINGS), save_every=1
    )
    manager.register("model", nn.Linear(8, 8))
    for step in range(6):
        manager.start_step(step)
    manager.save(overwrite=True)
    manager.shutdown()
    with CheckpointStore(tmp_path, read_only=True) as store:
        assert store.steps() == (1, 2, 3, 4, 5), "the last one was finished by shutdown"


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with_bias, without = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    for model in (with_bias, without):
        manager = StateManager(checkpoint_store=CheckpointStore(tmp_path, settings=_SETTINGS))
        manager.register("model", model)
        manager.start_step(1)
        if model is with_bias:
            manager.save(wait=True)
        else:
            before = without.weight.clone()
            with pytest.raises(RegistryError, match="bias"):
                manager.resume()
            assert torch.equal(without.weight, before)
            manager.start_step(2)
        manager.shutdown()


@pytest.mark.parametrize(
    ("into", "expected"),
    [
        ({"model": {"weight": torch.zeros(64, 65)}}, r"weight: float32\[64, 65\] here, float32\[64, 64\] in the"),
        ({"model": {"weight": torch.zeros(64, 64).bfloat16()}}, r"model\.weight: bfloat16\[64, 64\] here"),
        ({"model": {"weight": torch.zeros(64, 64), "bias": torch.zeros(3)}}, r"model\.bias: not in the checkpoint"),
        ({"model": {"weight": torch.zeros(64, 64)}, "ema": [torch.zeros(3)]}, r"ema\.0: not in the checkpoint"),
    ],
)
def test_a_state_that_would_be_loaded_in_part_is_refused(
    store: CheckpointStore, into: dict[str, Any], expected: str
) -> None:
    store.save(1, _state(1), wait=True)
    with pytest.raises(RestoreError, match=expected):
        store.load(1, into=into)
    assert not into["model"]["weight"].any()


def test_values_alone_are_loaded_as_well(store: CheckpointStore) -> None:
    store.save(1, _state(4), wait=True)
    store.save(2, {"step": 7, "name": "x"}, wait=True)
    assert store.load(2).state == {"step": 7, "name": "x"}
    assert store.load(1, into={"step": 0}).state == {"step": 4}
    assert store.load(1, into={}).state == {}


def test_a_closed_store_does_nothing_more_to_a_root_that_may_be_anothers(tmp_path: Path) -> None:
    first = CheckpointStore(tmp_path)
    for step in (1, 2):
        first.save(step, _state(step), wait=True)
    closing = [threading.Thread(target=first.close) for _ in range(3)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    with CheckpointStore(tmp_path) as second:
        for use in (
            lambda: first.prune(1),
            lambda: first.load(1),
            first.steps,
            first.verify,
            first.check_health,
            lambda: first.save(3, _state(3)),
            lambda: first.prefault(_state(3)),
        ):
            with pytest.raises(CheckpointError, match="expected an open store, this one has been closed"):
                use()
        assert second.steps() == (1, 2)


def test_an_action_that_fails_raises_its_own_error_unless_all_ranks_raise_the_same(store: CheckpointStore) -> None:
    def refuse() -> None:
        raise CheckpointExistsError("the root has one")

    def count() -> None:
        int("too little")

    with pytest.raises(ValueError, match="too little"):
        store.run_on_all_ranks("count", count, timeout=timedelta(seconds=30))
    with pytest.raises(CheckpointExistsError, match="the root has one"):
        store.run_on_all_ranks("look", refuse, timeout=timedelta(seconds=30))


def test_a_process_that_ends_finishes_what_it_is_saving(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from ft_transport import CheckpointStore; from programs import fork_writers\n"
        "fork_writers()\n"
        "CheckpointStore(sys.argv[1]).save(1, {'a': torch.ones(10_000_000)})\n"
        "raise RuntimeError('of the user')"
    )
    ended = run([sys.executable, "-c", script, str(tmp_path)], ends_as_interpreter=True, timeout=100)
    assert (ended.returncode, "of the user" in ended.stderr) == (1, True), ended.stderr
    with CheckpointStore(tmp_path) as store:
        store.verify(1)


@pytest.mark.parametrize("num_own", [1, 2])
def test_a_list_that_was_longer_fills_the_one_that_is_here(store: CheckpointStore, num_own: int) -> None:
    store.save(1, {"history": [torch.ones(2), torch.full((2,), 2.0)]}, wait=True)
    own = [torch.zeros(2) for _ in range(num_own)]
    loaded: Any = store.load(1, into={"history": own})
    assert [each.tolist() for each in loaded.state["history"]] == [[1, 1], [2, 2]]
    assert all(each is mine for each, mine in zip(loaded.state["history"], own, strict=False))


def test_a_list_that_was_shorter_is_refused_by_what_it_lacks(store: CheckpointStore) -> None:
    store.save(1, {"history": [torch.ones(2)]}, wait=True)
    with pytest.raises(RestoreError, match=r"same form; history\.1: not in the checkpoint; nothing was loaded"):
        store.load(1, into={"history": [torch.zeros(2), torch.zeros(2)]})


class TestMemoryThatIsSharedInAnotherWay:
    """A destination that two tensors share cannot hold what is different there."""

    WHOLE = torch.arange(10.0)
    OWN = torch.full((12,), 5.0)
    FIRST = OWN[:10]

    @pytest.mark.parametrize(
        ("saved", "into", "named"),
        [
            pytest.param({"a": WHOLE, "b": WHOLE + 1}, {"a": FIRST, "b": FIRST}, "b", id="one tensor for two"),
            pytest.param({"a": WHOLE, "b": WHOLE + 1}, {"a": FIRST, "b": OWN[2:]}, "b", id="views that overlap"),
            pytest.param({"a": WHOLE}, {"a": OWN[:1].expand(10)}, "a", id="one element for many"),
            pytest.param({"a": WHOLE, "b": WHOLE[2:5]}, {"a": FIRST.clone(), "b": FIRST[:3].clone()}, "b", id="a view"),
        ],
    )
    def test_it_is_refused_by_name_and_stays_as_it_was(
        self, store: CheckpointStore, saved: dict[str, Any], into: dict[str, Any], named: str
    ) -> None:
        store.save(1, saved, wait=True)
        with pytest.raises(RestoreError, match=f"{named}: shares memory with other tensors than in the checkpoint"):
            store.load(1, into=into)
        assert all(bool((tensor == 5).all()) for tensor in into.values())

    def test_views_ties_and_twins_that_are_shared_alike_are_loaded(self, store: CheckpointStore) -> None:
        whole = torch.arange(10.0)
        store.save(1, {"a": whole, "b": whole[2:5], "c": whole, "d": whole.view(2, 5).t()}, wait=True)
        own = torch.zeros(10)
        into = {"a": own, "b": own[2:5], "c": own, "d": own.view(2, 5).t()}
        store.load(1, into=into)
        assert torch.equal(own, whole)

    def test_a_tie_fills_two_tensors(self, store: CheckpointStore) -> None:
        whole = torch.arange(10.0)
        store.save(1, {"a": whole, "b": whole}, wait=True)
        into = {"a": torch.zeros(10), "b": torch.zeros(10)}
        store.load(1, into=into)
        assert torch.equal(into["a"], whole)
        assert torch.equal(into["b"], whole)

    def test_a_tensor_without_memory_comes_as_a_new_one(self, store: CheckpointStore) -> None:
        store.save(1, {"a": torch.arange(10.0)}, wait=True)
        loaded = store.load(1, into={"a": torch.empty(10, device="meta")})
        assert torch.equal(loaded.state["a"], torch.arange(10.0))


def test_a_directory_without_its_list_of_files_is_warned_of(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        store.save(step, _state(step), wait=True)
    (store.root / "step-2" / "manifest.json").unlink()
    with caplog.at_level("WARNING"):
        assert store.steps() == (1,)
    assert "step-2 has no manifest.json and is ignored" in caplog.text
