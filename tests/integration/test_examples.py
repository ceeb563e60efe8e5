"""The examples in ``docs/examples`` run as their first lines say, and what they claim is so."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_servers import VLLMStandIn, serving
from example_runs import EXAMPLES, ExampleReplicas, example_replicas
from programs import run
from quorum_threads import lighthouse
from safetensors.torch import load_file

pytest.importorskip("torchft")

pytestmark = [pytest.mark.usefixtures("torchft_ready"), pytest.mark.timeout(180)]

_TIMEOUT_S = 60.0
_LAST_STEP = 12
_KILLED_AFTER = 4


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as at:
        yield at


def _kill_one_of_two(replicas: ExampleReplicas, variable: str, *arguments: str, num_ranks: int = 1) -> list[int]:
    """Kills the second of two replicas and starts it again; the first waits for it, so that the step is known.

    Returns:
        The steps that the healed replica printed.
    """

    def start(index: str) -> None:
        replicas.start(index, *arguments, environment={variable: index}, num_ranks=num_ranks)

    start("0")
    start("1")
    replicas.wait_for_step(replicas.starts["1"][-1], _KILLED_AFTER, _TIMEOUT_S)
    replicas.kill("1")
    start("1")
    replicas.wait_for_end(_TIMEOUT_S)
    return sorted(replicas.starts["1"][-1][0].weights)


@pytest.mark.parametrize("manager", ["ft_transport", pytest.param("torchft", marks=pytest.mark.slow)])
def test_the_script_of_torchft_trains_with_either_manager_and_heals_with_ours(address: str, manager: str) -> None:
    with example_replicas("train_ddp.py", address) as replicas:
        arguments = ("--with", manager, "--steps", str(_LAST_STEP), "--min-replicas", "2")
        if manager == "torchft":
            # Where a peer dies, an assertion of torchft's own DDP ends the other one now and then, so none is killed.
            for index in ("0", "1"):
                replicas.start(index, *arguments, environment={"REPLICA_GROUP_ID": index})
            replicas.wait_for_end(_TIMEOUT_S)
            return

        steps = _kill_one_of_two(replicas, "REPLICA_GROUP_ID", *arguments)

        assert steps[-1] == _LAST_STEP
        assert steps[0] >= _KILLED_AFTER, "it healed, and did not begin again"
        assert [step for step, digests in replicas.digests().items() if step and len(digests) != 1] == []


def test_only_the_import_of_manager_differs() -> None:
    lines = (EXAMPLES / "train_ddp.py").read_text().splitlines()

    assert [line.strip() for line in lines if re.search(r"^\s+from \w+ import .*\bManager\b", line)] == [
        "from torchft import Manager",
        "from manager import Manager",
    ]
    assert len([line for line in lines if "options.manager" in line]) == 1


@pytest.mark.slow
def test_ranks_of_fsdp2_heal_each_from_its_own(address: str) -> None:
    with example_replicas("train_fsdp2.py", address) as replicas:
        steps = _kill_one_of_two(replicas, "REPLICA", "--steps", str(_LAST_STEP), "--min-replicas", "2", num_ranks=2)

        assert steps[-1] == _LAST_STEP
        assert steps[0] >= _KILLED_AFTER
        for rank in (0, 1):
            assert [step for step, digests in replicas.digests(rank).items() if step and len(digests) != 1] == []
        assert replicas.digests(0)[_LAST_STEP] != replicas.digests(1)[_LAST_STEP], "each rank has a shard of its own"


@pytest.mark.slow
def test_islands_of_diloco_are_equal_after_each_sync(address: str) -> None:
    with example_replicas("train_diloco.py", address) as replicas:
        steps = _kill_one_of_two(replicas, "ISLAND", "--syncs", str(_LAST_STEP), "--min-islands", "2")

        assert steps[-1] == _LAST_STEP
        assert steps[0] >= _KILLED_AFTER
        assert [step for step, digests in replicas.digests().items() if len(digests) != 1] == []


@pytest.mark.slow
def test_an_adapter_reaches_an_engine_while_it_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    stand_in = VLLMStandIn()  # of the engine alone; `make test-engines` has the real one
    with serving(stand_in):
        arguments = ["--engine", stand_in.url, "--versions", str(tmp_path), "--steps", "4", "--publish-every", "2"]
        done = run(
            [sys.executable, str(EXAMPLES / "train_lora.py"), *arguments], timeout=_TIMEOUT_S, env={**os.environ}
        )

    assert done.returncode == 0, done.stderr
    assert "step 4 loss" in done.stdout
    assert stand_in.adapters == {"policy": str(tmp_path / "version-4")}
    assert set(load_file(tmp_path / "version-4" / "adapter_model.safetensors")) == set(stand_in.tensors["policy"])
