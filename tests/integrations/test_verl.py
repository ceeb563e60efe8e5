"""Updates of rollout workers by the real verl: what arrives is what the actor has, also after faults."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKERS = Path(__file__).parents[1] / "workers"
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "publishing.md"

pytestmark = pytest.mark.timeout(1800)


def documented_overrides() -> list[str]:
    """Return the lines that the documentation adds to a user's command."""
    diff = DOCUMENT.read_text().split("## verl")[1].split("```diff\n")[1].split("```")[0]
    return [line[1:].strip(" \\") for line in diff.splitlines() if line.startswith("+")]


def run(directory: Path, *command: object, **variables: str) -> str:
    """Run a driver in a directory, from which its workers can import modules."""
    environment = {name: each for name, each in os.environ.items() if not name.startswith("FT_TRANSPORT_")}
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**environment, **ENVIRONMENT, **variables},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-8000:]
    return ended.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("verl")
    run(directory, WORKERS / "verl_run.py", directory, *documented_overrides())
    result: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return result


def check_exact(update: dict[str, Any]) -> None:
    assert update["error"] == ""
    assert [each["digest"] for each in update["got"].values()] == [update["expected"]] * len(update["got"])


def fetched(update: dict[str, Any]) -> list[float]:
    """Return the share of the weights that each rollout worker has fetched."""
    return [each["num_bytes_fetched"] / each["num_bytes"] for each in update["got"].values()]


def test_each_update_arrives_bit_for_bit_whatever_its_global_step(found: dict[str, Any]) -> None:
    updates = found["undisturbed"]
    assert len({each["expected"] for each in updates}) == len(updates) == 12  # the actor has trained
    for update in updates:
        check_exact(update)
    steps = [update["got"]["0"]["global_steps"] for update in updates]
    assert steps == [None, 1, 2, 2, 7, 3, None, 4, 5, 6, 7, 8]


def test_rollout_workers_fetch_deltas_from_their_second_update_on(found: dict[str, Any]) -> None:
    first, *later = found["undisturbed"]
    assert fetched(first) == [1, 1]
    for number, update in enumerate(later, 1):
        shares = fetched(update)
        if number == 6:
            assert shares.pop(2) == 1  # the replica that was added then
        assert max(shares) < 0.02
        assert update["metrics"]["ft_transport/delta_bytes"] == update["got"]["0"]["num_bytes_fetched"]


def test_a_replaced_rollout_worker_fetches_all_and_the_others_a_delta(found: dict[str, Any]) -> None:
    assert found["dead_replica"]["error"].startswith("ActorDiedError")
    check_exact(found["replaced_replica"])
    own, replaced, other = fetched(found["replaced_replica"])
    assert replaced == 1
    assert max(own, other) < 0.02


def test_a_failure_of_the_actor_reaches_the_rollout_workers_and_the_next_update_succeeds(found: dict[str, Any]) -> None:
    assert "RuntimeError: half way" in found["failed_actor"]["error"]
    for failure in found["failed_actor"]["replicas"]:
        assert "the state cannot be captured" in failure
        assert "RuntimeError: half way" in failure
    check_exact(found["after_failure"])


def test_a_restarted_actor_sends_everything_once(found: dict[str, Any]) -> None:
    first, second = found["restarted_actor"]
    check_exact(first)
    check_exact(second)
    assert fetched(first) == [1, 1, 1]
    assert max(fetched(second)) < 0.02


def test_a_source_that_dies_during_the_transfer_is_an_error_on_each_rollout_worker(found: dict[str, Any]) -> None:
    dead = found["dead_source"]
    assert dead["error"]
    assert dead["seconds"] < 60
    for failure in dead["replicas"]:
        assert failure.startswith(("FetchFailedError", "PeerUnreachableError"))
    assert any("chunks are missing" in failure for failure in dead["replicas"])
    # No rollout has got part of the version: each still has the weights of the update before.
    before = found["restarted_actor"][-1]["expected"]
    assert dead["digests"] == [before] * 3
    for update in found["after_dead_source"]:
        check_exact(update)


def test_weights_of_all_dtypes_arrive_and_verls_buckets_take_them(tmp_path: Path) -> None:
    printed = run(tmp_path, WORKERS / "verl_engines.py")
    assert "expected FT_TRANSPORT_TOKEN or FT_TRANSPORT_TOKEN_FILE in the environment of this rollout worker" in printed
    assert printed.endswith("all checks passed\n")


REPLACED = {
    "test_correctness_on_gpu.py": [
        # The configuration that the documentation names.
        ('backend="nccl"', 'backend="ft_transport", custom_backend_module="ft_transport.publish.verl_backend"'),
        ('{"nccl": {"rebuild_group": rebuild_group, "multi_sender": multi_sender}}', "{}"),
        # What needs a GPU.
        ("use_remove_padding=True", 'use_remove_padding=True, override_config={"attn_implementation": "eager"}'),
        ("tests.checkpoint_engine.test_utils", "test_utils"),
    ],
    "test_utils.py": [
        ('forward_only=True, fsdp_size=resource_pool.world_size, strategy="fsdp"', 'strategy="fsdp2"'),
        ("engine_config=engine_config,", "engine_config=engine_config, optimizer_config=FSDPOptimizerConfig(lr=1e-6),"),
        ("FSDPEngineConfig, HFModelConfig", "FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig"),
    ],
}
EXAMPLE = """
import sys
from pathlib import Path
import torch
from verl_run import make_model
from test_correctness_on_gpu import test_nccl_checkpoint_engine

model = make_model(Path(sys.argv[1]) / "model", torch.bfloat16, vocab_size=64, hidden_size=32)
test_nccl_checkpoint_engine(False, False, 2, 2, num_gpus_per_node=4, model_path=str(model))
print("the example has ended")
"""


def test_verls_own_example_runs_with_another_configuration(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    # The wheel of verl has its tests.
    examples = Path(spec.origin).parents[1] / "tests" / "checkpoint_engine"
    for name, replaced in REPLACED.items():
        source = (examples / name).read_text()
        for before, after in replaced:
            assert before in source, before
            source = source.replace(before, after)
        (tmp_path / name).write_text(source)
    (tmp_path / "driver.py").write_text(EXAMPLE)
    printed = run(
        tmp_path,
        tmp_path / "driver.py",
        tmp_path,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}",
        RAY_OVERRIDE_RESOURCES='{"CPU": 32, "GPU": 4}',
        # The actor of the example, unlike verl's own, does not import `custom_backend_module`.
        VERL_USE_EXTERNAL_MODULES="verl_on_cpu,ft_transport.publish.verl_backend",
    )
    # After each update, the example raises an error if the weights of a worker differ from those of the model.
    assert "the example has ended" in printed
