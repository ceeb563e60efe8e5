"""A stand-in for SGLang's scheduler, which needs a GPU: what it answers to the tokenizer manager, without a model.

It follows SGLang 0.5.23 (python/sglang/srt):

- managers/scheduler.py: messages are handled one after the other, in the order in which they came, and none while
  weights are loaded; ``pause_generation`` keeps the requests where they are (``in_place``) or puts them back into the
  queue (``retract``); ``abort_request`` takes those of the queue out at once, and those that run at their next step;
  ``flush_cache`` does nothing while a request runs, or waits in an engine that is not paused.
- managers/scheduler_components/weight_updater.py: an update that is refused changes no version, and one whose cache
  could not be flushed has changed the weights all the same.
- model_executor/model_runner_components/weight_updater.py: weights that are not there are refused; where loading
  raises, the way back reads the same directory, raises as well and ends the process.
- lora/lora_manager.py: a name that is loaded is refused.

The token that a request gets is the version of the weights, or of its adapter, that it was computed with. A file of
orders (JSON) says what else is to happen: ``hold`` lets no update end, ``refuse`` refuses each with this text,
``crash`` ends the process in the middle of one, ``finish`` ends every request.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

ORDERS: Final = "SGLANG_STAND_IN_ORDERS"
_STEP_S: Final = 0.02
_MAX_TOKENS: Final = 1 << 20


@dataclass
class Orders:
    """See the module."""

    hold: bool = False
    refuse: str = ""
    crash: bool = False
    finish: bool = False

    @classmethod
    def read(cls) -> Orders:
        """Those of now."""
        return cls(**json.loads(Path(os.environ[ORDERS]).read_text()))


@dataclass
class Request:
    """One that was sent to the scheduler."""

    rid: str
    adapter: str | None
    num_prompt_tokens: int
    num_left: int
    num_done: int = 0
    num_retractions: int = 0
    is_aborted: bool = False


@dataclass
class Scheduler:
    """The stand-in; its messages are SGLang's.

    Attributes:
        channels: To the tokenizer manager, and from it.
        directory: Of the weights.
        adapters: That are loaded, by their id.
        waiting: Requests in the queue.
        running: Requests in the batch.
        is_paused: Whether no step is made.
    """

    channels: SchedulerIpcChannels
    directory: str
    adapters: dict[str, Any] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    is_paused: bool = False

    def run(self) -> None:
        """Never ends."""
        socket = self.channels.recv_from_tokenizer
        while True:
            if socket.poll(1000 * _STEP_S):
                answer = self._handle(io_struct.sock_recv(socket))
                if answer is not None:
                    self.channels.send_to_tokenizer.send_output(answer)
            elif not self.is_paused:
                self._step()

    def _handle(self, message: Any) -> Any:
        match message:
            case io_struct.TokenizedGenerateReqInput():
                self.waiting.append(
                    Request(
                        message.rid,
                        message.lora_id,
                        len(message.input_ids),
                        message.sampling_params.max_new_tokens or _MAX_TOKENS,
                    )
                )
                return None
            case io_struct.AbortReq():
                self._abort(message)
                return None
            case io_struct.PauseGenerationReqInput():
                self.is_paused = True
                if message.mode == "retract":
                    for request in self.running:
                        request.num_retractions += 1
                    self.waiting, self.running = self.running + self.waiting, []
                return None
            case io_struct.ContinueGenerationReqInput():
                self.is_paused = False
                return None
            case io_struct.UpdateWeightFromDiskReqInput():
                success, text = self._update(message)
                return io_struct.UpdateWeightFromDiskReqOutput(success=success, message=text)
            case io_struct.LoadLoRAAdapterReqInput():
                return self._adapters(self._load(message.to_ref()))
            case io_struct.UnloadLoRAAdapterReqInput():
                self.adapters.pop(message.lora_id, None)
                return self._adapters("")
            case io_struct.FlushCacheReqInput():
                return io_struct.FlushCacheReqOutput(success=self._is_flushed())
            case io_struct.GetInternalStateReq():
                return io_struct.GetInternalStateReqOutput(internal_state={})
            case io_struct.FreezeGCReq():
                return None
            case _:
                raise TypeError(f"expected a message that publishing leads to, got {message}")

    def _abort(self, message: Any) -> None:
        def is_meant(request: Request) -> bool:
            return message.abort_all or request.rid.startswith(message.rid)

        for request in filter(is_meant, self.waiting):
            self.channels.send_to_tokenizer.send_output(io_struct.AbortReq(rid=request.rid))
        self.waiting = [request for request in self.waiting if not is_meant(request)]
        for request in filter(is_meant, self.running):
            request.is_aborted = True

    def _update(self, message: Any) -> tuple[bool, str]:
        while (orders := Orders.read()).hold:
            time.sleep(_STEP_S)
        if orders.refuse:
            return False, orders.refuse
        files = sorted(Path(message.model_path).glob("*.safetensors"))
        if not files:
            return False, f"Failed to get weights iterator: no weights in {message.model_path}."
        if orders.crash:
            raise RuntimeError("the way back from weights that do not fit")
        for file in files:
            load_file(file)
        self.directory = message.model_path
        if message.flush_cache and not self._is_flushed():
            return False, "Weights were updated, but the cache was not flushed because requests are still running."
        return True, "Succeeded to update model weights."

    def _is_flushed(self) -> bool:
        return not self.running and (self.is_paused or not self.waiting)

    def _load(self, adapter: Any) -> str:
        """Says what is wrong with it."""
        try:
            config = LoRAConfig(adapter.lora_path)
            tensors = load_file(Path(adapter.lora_path) / "adapter_model.safetensors")
        except Exception as error:
            return str(error)
        if any(each.lora_name == adapter.lora_name for each in self.adapters.values()):
            return f"Failed to load LoRA adapter {adapter.lora_name} because it is already loaded"
        if not all(".lora_A." in name or ".lora_B." in name for name in tensors) or config.use_dora:
            return f"expected LoRA's matrices alone, got {sorted(tensors)}"
        self.adapters[adapter.lora_id] = adapter
        return ""

    def _adapters(self, wrong: str) -> Any:
        loaded = {each.lora_name: each.lora_path for each in self.adapters.values()}
        return io_struct.LoRAUpdateOutput(success=not wrong, error_message=wrong, loaded_adapters=loaded)

    def _step(self) -> None:
        self.running, self.waiting = self.running + self.waiting, []
        if not self.running:
            return
        reasons: list[Any] = []
        is_finishing = Orders.read().finish
        for request in self.running:
            request.num_done += 1
            request.num_left -= 1
            if request.is_aborted:
                reasons.append(FINISH_ABORT().to_json())
            elif is_finishing or not request.num_left:
                reasons.append(FINISH_LENGTH(length=request.num_done).to_json())
            else:
                reasons.append(None)
        self.channels.send_to_detokenizer.send_output(self._output(reasons))
        self.running = [request for request, reason in zip(self.running, reasons, strict=True) if reason is None]

    def _output(self, reasons: list[Any]) -> Any:
        running = self.running
        known = {
            "rids": [request.rid for request in running],
            "finished_reasons": reasons,
            "output_ids": [array("q", [self._token(request)]) for request in running],
            "prompt_tokens": [request.num_prompt_tokens for request in running],
            "completion_tokens": [request.num_done for request in running],
            "reasoning_tokens": [0] * len(running),
            "cached_tokens": [0] * len(running),
            "retraction_counts": [request.num_retractions for request in running],
        }
        kind = io_struct.BatchTokenIDOutput
        others = {name: None for name in kind.__struct_fields__ if name not in known}
        return kind(**{**others, **known})

    def _token(self, request: Request) -> int:
        path = self.directory if request.adapter is None else self.adapters[request.adapter].lora_path
        number = re.fullmatch(r"version-(\d+)", Path(path).name)
        return int(number[1]) if number else 0


def run_scheduler(server_args: Any, port_args: Any, *ranks_and_pipe: Any) -> None:
    """What ``launch_server`` takes as ``run_scheduler_process_func``."""
    channels = SchedulerIpcChannels.create(
        port_args=port_args,
        is_rank_zero=True,
        skip_tokenizer_init=True,
        metrics_enabled=False,
        enable_scripted_runtime=False,
    )
    *_ranks, pipe = ranks_and_pipe
    ready = {"status": "ready", "max_total_num_tokens": _MAX_TOKENS, "max_req_input_len": 1024, "startup_time": {}}
    pipe.send(ready)
    try:
        Scheduler(channels, server_args.model_path).run()
    except Exception:
        # SGLang's does so.
        os.kill(os.getppid(), signal.SIGQUIT)
        raise
