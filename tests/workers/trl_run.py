"""A run of TRL's asynchronous GRPO trainer, which waits after each synchronization of the weights.

Usage: ``trl_run.py MODEL OUTPUT ROOT URL disk|pull|lora NUM_STEPS ENGINE_TIMEOUT_S``. It resumes from the newest
checkpoint in OUTPUT, prints a line of JSON when the server has the weights of a step, and continues when it reads a
line. With ``lora`` the versions lie on a disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from proxy import Proxy, proxied
from served_memory import until
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from ft_transport import Delivery, EngineConnection, HTTPTransport, Publisher, TransportSettings, VLLMEngine
from ft_transport.publish.trl import PublisherWeightTransfer

NUM_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Proxied(VLLMEngine):
    """An engine whose workers reach the publisher's transport through a proxy."""

    proxy_url: str = ""

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        async def address() -> str:
            await delivery.source(self.url)
            return self.proxy_url

        return await VLLMEngine.deliver(self, connection, replace(delivery, address=address))


class Pausing(TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Waits after TRL's own callbacks, which synchronize the weights."""

    def __init__(self, trainer: AsyncGRPOTrainer, transfer: PublisherWeightTransfer, proxy: Proxy | None) -> None:
        self._trainer = trainer
        self._transfer = transfer
        self._proxy = proxy

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **_rest: Any) -> None:
        self.on_step_end(_args, state)

    def on_step_end(self, _args: Any, state: Any, *_: Any, **_rest: Any) -> None:
        if not state.is_world_process_zero:
            return
        # The next step needs no server.
        until(lambda: self._trainer.rollout_queue.qsize() >= NUM_SAMPLES, 60)
        assert self._transfer.publisher is not None
        step = {
            "step": state.global_step,
            "version": self._transfer.publisher.latest(),
            "fetched": self._proxy.num_bytes if self._proxy is not None else 0,
        }
        print(json.dumps(step), flush=True)
        sys.stdin.readline()
        if self._proxy is not None:
            self._proxy.num_bytes = 0


class CPUAttention:
    """A stand-in for the FlashAttention 3 kernel of ``trl.experimental.async_grpo.packing``."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        *_: Any,
        softmax_scale: float,
        **_rest: Any,
    ) -> torch.Tensor:
        """Attention of segments to paths, [tokens, heads, size]: the last query of each attends to the whole path."""
        parts = []
        for (q, q_end), (k, k_end) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
            mask = torch.ones(q_end - q, k_end - k, dtype=torch.bool).tril((k_end - k) - (q_end - q))
            rows = (each.transpose(0, 1) for each in (query[q:q_end], key[k:k_end], value[k:k_end]))
            part = scaled_dot_product_attention(*rows, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / len(ids) for ids in completion_ids]


@contextmanager
def publishing(
    root: str, url: str, way: str, timeout: timedelta
) -> Iterator[tuple[PublisherWeightTransfer, Proxy | None]]:
    if way != "pull":
        yield (
            PublisherWeightTransfer(lambda group: Publisher([VLLMEngine(url)], root, group, engine_timeout=timeout)),
            None,
        )
        return
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", same_host=False)
    transport: HTTPTransport[Any] = HTTPTransport(settings=settings)
    with proxied(urlsplit(transport.metadata()).port or 0) as proxy:
        pulling = Proxied(url, pulls=True, proxy_url=proxy.url)
        yield PublisherWeightTransfer(lambda group: Publisher([pulling], root, group, transport=transport)), proxy
    transport.shutdown()


def main() -> None:
    directory, output, root, url, way, num_steps, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    # Parts of the trainer that need a GPU: the name of the GPU for a metric, and the kernel of its attention.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = CPUAttention
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = qwen3_chat_template
    arguments = AsyncGRPOConfig(
        output_dir=output,
        max_steps=int(num_steps),
        per_device_train_batch_size=NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=8,
        token_budget=-1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        vllm_server_base_url=url,
    )
    with publishing(root, url, way, timedelta(seconds=float(timeout_s))) as (transfer, proxy):
        trainer = AsyncGRPOTrainer(
            model=directory,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": f"t{number} t9"}] for number in range(1, 100)]}
            ),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if way == "lora" else None,
            weight_transfer=transfer,
        )
        # Large changes of few elements: the server generates other tokens, and a delta is smaller than the model.
        chosen = [each for name, each in trainer.model.named_parameters() if "layers.0.self_attn.q_proj" in name]
        trainer.optimizer = torch.optim.Adam([each for each in chosen if each.requires_grad], lr=0.05)
        trainer.add_callback(Pausing(trainer, transfer, proxy))
        trainer.train(resume_from_checkpoint=get_last_checkpoint(output))
        assert transfer.publisher is None
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
