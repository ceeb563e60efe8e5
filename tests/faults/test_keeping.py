"""A state outlives the process that trained it, exactly, and only for a restart of the same job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_ranks
import pytest
from keepers import Trainer, is_alive, wait_until
from programs import Program, run

from ft_transport.cli.keepers import find_keepers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

KEEPING_TRAINER = Path(__file__).parents[1] / "workers" / "keeping_trainer.py"
HERE = "the keeper of this host"


def keeper_of(trainer: int) -> int | None:
    """The process id of a process's keeper."""
    return next((each.pid for each in find_keepers() if each.trainer_pid == trainer), None)


class Kept:
    """Starts processes of `keeping_trainer`, and ends what is left of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trainers: list[Trainer] = []
        self.keepers: set[int] = set()

    def start(self, *arguments: object, **environment: str) -> Trainer:
        variables = {**os.environ, "KEEPING_DIRECTORY": str(self.directory), **environment}
        trainer = Trainer(str(KEEPING_TRAINER), *map(str, arguments), launch=Program, env=variables)
        self.trainers.append(trainer)
        return trainer

    def keeper(self, trainer: Trainer) -> int:
        found: list[int | None] = []

        def is_found() -> bool:
            found.append(keeper_of(trainer.process.pid))
            return found[-1] is not None

        wait_until(is_found)
        assert found[-1] is not None
        self.keepers.add(found[-1])
        return found[-1]

    def close(self) -> None:
        for trainer in self.trainers:
            keeper = keeper_of(trainer.process.pid)
            trainer.kill()
            if keeper is not None:
                self.keepers.add(keeper)
        for keeper in filter(is_alive, self.keepers):
            os.kill(keeper, signal.SIGKILL)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    found = Kept(tmp_path)
    yield found
    found.close()


_MEMORY_GROUPS = [
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
]
"""Where the kernel's memory control groups are, and the file that limits one: of version 1, and of version 2."""


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory control group of 64 MB: the kernel kills a process in it that needs more."""
    for root, limit in _MEMORY_GROUPS:
        group = root / f"ft-transport-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("needs a memory control group")


@pytest.mark.slow
def test_a_process_that_is_killed_for_its_memory_leaves_its_state(kept: Kept, small_memory: Path) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(3)")
    kept.keeper(trainer)
    (small_memory / "cgroup.procs").write_text(str(trainer.process.pid))
    trainer.send("hoard = [bytearray(os.urandom(1 << 20)) for _ in range(1000)]")
    trainer.close()
    assert trainer.process.returncode == -signal.SIGKILL
    assert kept.start().ask("resume()") == (3, 3, HERE, digest)


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "os._exit(1)", "raise ValueError", "crash()"])
def test_a_restarted_process_has_the_state_of_the_dead_one(kept: Kept, death: str) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(3)")
    kept.keeper(trainer)
    trainer.send(death)
    trainer.close()
    successor = kept.start()
    assert successor.ask("resume()") == (3, 3, HERE, digest)
    # The successor's own keeper has the state as well: it may die before it has kept a step.
    successor.kill()
    third = kept.start()
    assert third.ask("resume()") == (3, 3, HERE, digest)
    again = third.ask("train(1)")
    third.kill()
    assert kept.start().ask("resume()") == (4, 4, HERE, again)


def test_nothing_is_left_after_a_shutdown(kept: Kept) -> None:
    trainer = kept.start()
    trainer.ask("train(3)")
    keeper = kept.keeper(trainer)
    trainer.run("manager.shutdown()")
    trainer.kill()
    wait_until(lambda: not is_alive(keeper))
    assert kept.start().ask("resume()") is None


def test_a_step_that_is_killed_halfway_leaves_the_one_before(kept: Kept) -> None:
    trainer = kept.start(1000)
    digest = trainer.ask("train(2)")
    trainer.send("train(1); optimizer.step(); manager.start_step(4); os.kill(os.getpid(), 9)")
    trainer.close()
    step, _, _, found = kept.start(1000).ask("resume()")
    assert step in {3, 4}
    assert found != digest


def test_a_manager_of_the_same_process_resumes_after_an_error(kept: Kept) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(2)")
    assert trainer.ask("error_of(crash)") == "ValueError"
    trainer.run("model, optimizer, counter = nn.Linear(WIDTH, WIDTH), None, Counter()")
    trainer.run("optimizer = torch.optim.AdamW(model.parameters())")
    trainer.run("manager = Manager(checkpoint_transport=HTTPTransport(), keep_every=EVERY); register()")
    assert trainer.ask("resume()") == (2, 2, HERE, digest)


def test_a_flipped_bit_is_named_and_the_state_before_it_taken(kept: Kept) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(2)")
    trainer.ask("train(1)")
    trainer.run("flip_bit(-1)")
    trainer.kill()
    successor = kept.start()
    assert successor.ask("resume()") == (2, 2, HERE, digest)
    log = successor.ask("log.getvalue()")
    assert "step 3 of the kept states cannot be loaded" in log
    assert "chunk" in log


def test_a_process_whose_kept_states_are_all_damaged_does_not_train_on(kept: Kept) -> None:
    trainer = kept.start()
    trainer.ask("train(2)")
    trainer.run("flip_bit(-1); flip_bit(-2)")
    trainer.kill()
    successor = kept.start()
    assert successor.ask("error_of(resume)") == "StateTornError"
    assert successor.ask("error_of(lambda: manager.start_step(0))") == "StateTornError"


def test_the_newer_of_a_kept_state_and_a_checkpoint_is_loaded(kept: Kept, tmp_path: Path) -> None:
    store = {"KEEPING_STORE": str(tmp_path / "store")}
    trainer = kept.start(16, 2, **store)
    trainer.ask("train(2)")
    trainer.ask("train(1)")
    trainer.run("manager.save(wait=True); checkpoint = digest()")
    checkpoint = trainer.ask("checkpoint")
    trainer.kill()
    successor = kept.start(16, 2, **store)
    step, count, source, found = successor.ask("resume()")
    assert (step, count, found) == (3, 3, checkpoint)
    assert "store" in source
    digest = successor.ask("train(1)")
    successor.kill()
    other = kept.start(16, 2, **store)
    assert other.ask("resume()") == (4, 4, HERE, digest)
    # The keeper is faster than a disk, and has this replica's local state.
    other.ask("train(2)")
    other.run("manager.save(wait=True)")
    other.kill()
    assert kept.start(16, 2, **store).ask("resume()")[2] == HERE


def test_a_newer_checkpoint_of_another_program_is_loaded_in_place_of_a_kept_state(kept: Kept, tmp_path: Path) -> None:
    store = {"KEEPING_STORE": str(tmp_path / "store")}
    trainer = kept.start(**store)
    trainer.ask("train(2)")
    saved = "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
    path = str(tmp_path / "store" / "step-9")
    trainer.run(f"import torch.distributed.checkpoint as dcp; dcp.save({saved}, checkpoint_id={path!r}, no_dist=True)")
    trainer.kill()
    step, _, source, _ = kept.start(**store).ask("resume()")
    assert step == 9
    assert "torch.distributed.checkpoint" in source


def test_a_checkpoint_is_loaded_where_all_kept_states_are_damaged(kept: Kept, tmp_path: Path) -> None:
    store = {"KEEPING_STORE": str(tmp_path / "store")}
    trainer = kept.start(**store)
    trainer.run("checkpoint = train(1); manager.save(wait=True)")
    checkpoint = trainer.ask("checkpoint")
    trainer.ask("train(2)")
    trainer.run("flip_bit(-1); flip_bit(-2)")
    trainer.kill()
    step, count, source, found = kept.start(**store).ask("resume()")
    assert (step, count, found) == (1, 1, checkpoint)
    assert "store" in source


@pytest.mark.parametrize(
    "other",
    [
        {"arguments": (16, 2)},
        {"environment": {"RANK": "1"}},
        {"environment": {"TORCHELASTIC_RUN_ID": "another"}},
        {"environment": {"FT_TRANSPORT_TOKEN": "another-token"}},
        {"environment": {"FT_TRANSPORT_TOKEN": ""}},
    ],
    ids=["command", "rank", "job", "token", "no token"],
)
def test_a_process_of_another_job_does_not_get_the_state(kept: Kept, other: dict[str, Any]) -> None:
    token = {"FT_TRANSPORT_TOKEN": "secret-of-the-job"}
    trainer = kept.start(**token)
    digest = trainer.ask("train(2)")
    trainer.kill()
    environment = {**token, **other.get("environment", {})}
    if not environment["FT_TRANSPORT_TOKEN"]:
        # Without a token, on a host that has one in no variable.
        del environment["FT_TRANSPORT_TOKEN"]
    stranger = kept.start(*other.get("arguments", ()), **environment)
    assert stranger.ask("resume()") is None
    stranger.kill()
    assert kept.start(**token).ask("resume()") == (2, 2, HERE, digest)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(kept: Kept) -> None:
    trainer = kept.start()
    trainer.ask("train(2)")
    trainer.kill()
    successor = kept.start()
    successor.run("manager.register('further', Counter()); before = digest()")
    assert successor.ask("resume()") is None
    assert "further" in successor.ask("log.getvalue()")
    assert successor.ask("digest() == before")
    assert successor.ask("train(1) != before")


def test_a_killed_keeper_is_replaced_and_has_the_states(kept: Kept) -> None:
    trainer = kept.start()
    trainer.ask("train(2)")
    keeper = kept.keeper(trainer)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not is_alive(keeper))
    digest = trainer.ask("train(1)")
    assert kept.keeper(trainer) != keeper
    trainer.kill()
    assert kept.start().ask("resume()") == (3, 3, HERE, digest)


def test_a_second_process_of_the_same_name_is_warned(kept: Kept) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(2)")
    second = kept.start()
    assert second.ask("resume()") is None
    second.ask("train(1)")
    assert "another process with the same command" in second.ask("log.getvalue()")
    second.kill()
    trainer.kill()
    assert kept.start().ask("resume()") == (2, 2, HERE, digest)


def test_a_rollback_drops_the_later_states(kept: Kept) -> None:
    trainer = kept.start()
    trainer.ask("train(2)")
    trainer.run("state = {'user': None}; import copy; saved = copy.deepcopy(manager.replica_state())")
    trainer.ask("train(3)")
    trainer.run("manager.load(saved); counter.value = 2")
    digest = trainer.ask("train(1)")
    trainer.kill()
    assert kept.start().ask("resume()") == (3, 3, HERE, digest)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_are_killed_at_random_resume_the_same_step_exactly(num_ranks: int) -> None:
    kill_ranks.run(num_ranks, num_kills=5, keep_every=2, seed=num_ranks)


def test_the_command_lists_keepers_and_drops_the_states_of_dead_trainers(kept: Kept) -> None:
    living, dead = kept.start(100), kept.start(101)
    digest = living.ask("train(2)")
    dead.ask("train(2)")
    keeper = kept.keeper(dead)
    dead.kill()
    shown = {each["trainer_pid"]: each for each in keepers()["keepers"]}
    assert shown[living.process.pid]["is_trainer_alive"]
    assert not shown[dead.process.pid]["is_trainer_alive"]
    assert shown[dead.process.pid]["num_snapshots"] == 2
    assert shown[dead.process.pid]["held_bytes"] >= 2 * 3 * 4 * 101 * 101
    # Not the living trainer's, although it is named as well. Other tests have keepers on this host, too.
    assert keepers("--end", str(keeper), str(kept.keeper(living)))["ended"] == [keeper]
    wait_until(lambda: not is_alive(keeper))
    assert kept.start(101).ask("resume()") is None
    living.kill()
    assert kept.start(100).ask("resume()") == (2, 2, HERE, digest)


def keepers(*arguments: str) -> Any:
    command = [sys.executable, "-m", "ft_transport.cli", "keepers", "--json", *arguments]
    return json.loads(run(command, stdout=subprocess.PIPE, timeout=20, check=True).stdout)


def test_a_rollback_drops_the_later_states_before_the_first_step(kept: Kept) -> None:
    trainer = kept.start()
    trainer.run("import copy; saved = copy.deepcopy(manager.replica_state())")
    trainer.ask("train(3)")
    trainer.run("manager.load(saved); counter.value = 0; manager.start_step(0)")
    trainer.kill()
    assert kept.start().ask("resume()") is None


def test_a_kept_state_that_cannot_be_read_is_not_taken_for_none(kept: Kept) -> None:
    trainer = kept.start()
    trainer.ask("train(2)")
    trainer.run("[each.close.args[0].write_header(bytes(64)) for each in keeping().kept._kept]")
    trainer.kill()
    assert kept.start().ask("error_of(resume)") == "StateTornError"


def test_a_second_manager_of_one_process_leaves_the_first_ones_states(kept: Kept) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(2)")
    trainer.run("first, counter, before = manager, Counter(), model")
    trainer.run("model = nn.Linear(WIDTH, WIDTH); optimizer = torch.optim.AdamW(model.parameters())")
    trainer.run("manager = Manager(checkpoint_transport=HTTPTransport(), keep_every=EVERY); register()")
    trainer.ask("train(3)")
    assert "keeps its state on this host" in trainer.ask("log.getvalue()")
    trainer.kill()
    assert kept.start().ask("resume()") == (2, 2, HERE, digest)


def test_a_snapshot_that_fails_leaves_the_one_before(kept: Kept) -> None:
    trainer = kept.start()
    digest = trainer.ask("train(2)")
    trainer.run("kept = keeping().kept; kept.add = lambda pending: (pending.abandon(), 1 / 0)")
    trainer.run("optimizer.step(); manager.start_step(3); keeping()._wait_until_idle()")
    # The next snapshot is begun, and never complete.
    trainer.run("kept.add = lambda pending: os.kill(os.getpid(), 9)")
    trainer.send("optimizer.step(); manager.start_step(4); optimizer.step(); time.sleep(30)")
    trainer.close()
    assert kept.start().ask("resume()") == (2, 2, HERE, digest)


def test_a_shutdown_completes_the_snapshot_of_the_last_boundary(kept: Kept) -> None:
    trainer = kept.start(1000)
    trainer.ask("train(2)")
    trainer.run("optimizer.step(); manager.start_step(3)")
    trainer.run("manager._replica.close(wait=True, is_over=False)")  # a shutdown during an exception
    assert "failed" not in trainer.ask("log.getvalue()")
    trainer.kill()
    assert kept.start(1000).ask("resume()")[0] == 3
