"""Weight updates by the real verl on the CPU, with faults (`tests/integrations/test_verl.py`).

Usage: ``verl_run.py DIRECTORY OVERRIDE...``, with overrides of verl's configuration. Writes what happened to
``found.json``. The actor is verl's `ActorRolloutRefWorker` with FSDP2 and AdamW on two ranks over gloo. The rollout
workers are its `CheckpointEngineWorker`, and its `CheckpointEngineManager` runs the updates. Two parts stand in for
verl's: ``verl_on_cpu`` for the platform, and `Rollout` for the adapter of an inference engine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import transformers
from hydra import compose, initialize_config_module
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import split_resource_pool
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

from ft_transport import state_digest


def make_model(directory: Path, dtype: torch.dtype, *, vocab_size: int, hidden_size: int) -> Path:
    """Save a small Qwen2 with random weights, and a tokenizer, which verl loads as well."""
    config = transformers.Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    transformers.Qwen2ForCausalLM(config).to(dtype).save_pretrained(directory)
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(each): each for each in range(64)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2").save_pretrained(
        directory
    )
    return directory


class Actor(ActorRolloutRefWorker):
    """An actor rank that trains, reports the digest of its weights, and fails on request."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        torch.manual_seed(1000 * step + self.rank)
        engine = self.actor.engine
        tokens = torch.randint(0, engine.module.config.vocab_size, (2, 16))
        engine.module(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        """Return the digest of all weights in bfloat16."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        return state_digest({name: each.detach().to(torch.bfloat16) for name, each in weights})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_next(self) -> None:
        """Let the iterator over the weights fail half way in the next update."""
        engine = self.actor.engine
        original = engine.get_per_tensor_param

        def failing(**arguments: Any) -> tuple[Iterator[Any], None]:
            engine.get_per_tensor_param = original
            weights = list(original(**arguments)[0])

            def half() -> Iterator[Any]:
                yield from weights[: len(weights) // 2]
                raise RuntimeError("half way")

            return half(), None

        engine.get_per_tensor_param = failing


class Rollout(BaseRollout):
    """Stands in for the adapter of an inference engine: it stores the weights that it gets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, device_mesh=None, **options)
        self.weights: dict[str, torch.Tensor] = {}
        self.global_steps: int | None = None
        self.failure = ""

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int | None = None, **options: Any
    ) -> None:
        try:
            self.failure = ""
            self.weights = {name: tensor.clone() async for name, tensor in weights}
            self.global_steps = global_steps
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass


class RolloutWorker(CheckpointEngineWorker):
    """A rollout worker that reports the weights that it received."""

    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, Rollout(config=rollout_config, model_config=model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def got(self) -> dict[str, Any]:
        rollout, engine = self.server_adapter, self.checkpoint_engine
        return {
            "digest": state_digest(rollout.weights),
            "num_bytes": sum(each.nbytes for each in rollout.weights.values()),
            "num_bytes_fetched": engine.num_bytes_fetched,
            "global_steps": rollout.global_steps,
            "failure": rollout.failure,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kill_while_fetching(self, process_id: int) -> None:
        """Kill a process as soon as this worker has received some bytes of the next version."""
        receiver = self.checkpoint_engine._receiver

        def watch() -> None:
            before = receiver._handle
            while receiver._handle is before or receiver._handle.num_bytes < 1 << 20:
                time.sleep(0.0002)
            os.kill(process_id, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()


class Replica(RolloutReplica):
    """A replica of one worker, without a server."""

    async def launch_servers(self) -> None:
        pass

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        raise NotImplementedError

    async def _nothing(self, **_options: Any) -> None:
        pass

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = _nothing


class Job:
    """The driver of a job, with its actor and its replicas."""

    def __init__(self, config: Any, *, max_replicas: int) -> None:
        self.config = config.actor_rollout_ref
        pool = RayResourcePool([2 + max_replicas], max_colocate_count=3)
        self.actor_pool, *self.pools = split_resource_pool(pool, [2] + [1] * max_replicas)
        self.groups: dict[int, RayWorkerGroup] = {}
        self.num_updates = 0
        engine_config = omega_conf_to_dataclass(self.config.rollout.checkpoint_engine)
        self.manager = CheckpointEngineManager(engine_config, self.new_actor(), [])

    def new_actor(self) -> RayWorkerGroup:
        made = RayClassWithInitArgs(cls=ray.remote(Actor), config=self.config, role="actor")
        self.actor = RayWorkerGroup(resource_pool=self.actor_pool, ray_cls_with_init=made, device_name="cpu")
        self.actor.init_model()
        return self.actor

    def restart_actor(self) -> None:
        for worker in self.actor.workers:
            ray.kill(worker)
        self.manager.actor_wg = self.new_actor()

    def add_replica(self, rank: int) -> None:
        rollout, model = (omega_conf_to_dataclass(each) for each in (self.config.rollout, self.config.model))
        made = RayClassWithInitArgs(cls=ray.remote(RolloutWorker), rollout_config=rollout, model_config=model)
        self.groups[rank] = RayWorkerGroup(resource_pool=self.pools[rank], ray_cls_with_init=made, device_name="cpu")
        replica = Replica(replica_rank=rank, config=self.config.rollout, model_config=self.config.model)
        replica.workers = self.groups[rank].workers
        self.manager.add_replicas([replica])

    def update(self, global_steps: int | None = None) -> dict[str, Any]:
        """Train, and run an update. Return its metrics, or its error."""
        self.num_updates += 1
        self.actor.train(self.num_updates)
        began_s = time.monotonic()
        result: dict[str, Any] = {"metrics": {}, "error": ""}
        try:
            result["metrics"] = self.manager.update_weights(global_steps)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        return result | {"seconds": time.monotonic() - began_s}

    def compared(self, global_steps: int | None = None) -> dict[str, Any]:
        """Run an update. Add the digest of the actor's weights, and what each replica has got."""
        result = self.update(global_steps)
        return result | {"expected": self.actor.digest()[0], "got": self.got()}

    def got(self) -> dict[int, dict[str, Any]]:
        return {rank: group.got()[0] for rank, group in sorted(self.groups.items())}

    def failures(self, *, within_s: float) -> list[str]:
        """Wait until all replicas have failed, and return their errors."""
        deadline_s = time.monotonic() + within_s
        while True:
            found = [each["failure"] for each in self.got().values()]
            if all(found) or time.monotonic() > deadline_s:
                return found
            time.sleep(0.1)


def run(job: Job) -> dict[str, Any]:
    """Run updates without and with faults."""
    found: dict[str, Any] = {"undisturbed": []}
    job.add_replica(0)
    job.add_replica(1)
    for number, global_steps in enumerate([None, 1, 2, 2, 7, 3, None, 4, 5, 6, 7, 8]):
        if number == 6:
            job.add_replica(2)
        found["undisturbed"].append(job.compared(global_steps))

    ray.kill(job.groups[1].workers[0])
    found["dead_replica"] = job.update()
    job.manager.remove_replicas([job.manager.replicas[1]])
    job.add_replica(1)
    found["replaced_replica"] = job.compared()

    job.actor.fail_next()
    found["failed_actor"] = job.update() | {"replicas": job.failures(within_s=30)}
    found["after_failure"] = job.compared()

    job.restart_actor()
    found["restarted_actor"] = [job.compared(), job.compared()]

    job.restart_actor()
    job.groups[0].kill_while_fetching(job.actor.process_id()[0])
    found["dead_source"] = job.update() | {"replicas": job.failures(within_s=60)}
    found["dead_source"]["digests"] = [each["digest"] for each in job.got().values()]
    job.restart_actor()
    found["after_dead_source"] = [job.compared(), job.compared()]
    return found


def main() -> None:
    directory, overrides = Path(sys.argv[1]), sys.argv[2:]
    model = make_model(directory / "model", torch.float32, vocab_size=40000, hidden_size=512)
    ray.init(num_cpus=32, num_gpus=8, include_dashboard=False)
    fixed = [
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*fixed, *overrides])
    (directory / "found.json").write_text(json.dumps(run(Job(config, max_replicas=3))))


if __name__ == "__main__":
    main()
