"""The example of torchtitan, which prints the exact loss of each step and the samples of each rank, and may be killed.

Usage: ``titan_run.py [--plain] …`` with the options of ``train_torchtitan.py``; ``--plain`` is torchtitan alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

import train_torchtitan
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor

from ft_transport import state_digest

RANK = os.environ["RANK"]


def say(kind: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"kind": kind, "rank": RANK, **fields}) + "\n").encode())


class PrintedMetrics(MetricsProcessor):
    """torchtitan's metrics, which also prints the exact loss."""

    last_step: int | None = None

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The settings of torchtitan's metrics."""

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any) -> None:
        say("step", step=step, loss=global_avg_loss, grad_norm=grad_norm, extra=more["extra_metrics"])
        super().log(step, global_avg_loss, global_max_loss, grad_norm, **more)
        if step == self.last_step:
            os._exit(0)


class PrintedLoader(train_torchtitan.RandomTokenLoader):
    """Random tokens, of which it prints the first one of each batch."""

    before_first: Callable[[], None] = staticmethod(lambda: None)

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """The settings of torchtitan's data loader."""

    def __iter__(self) -> Iterator[Any]:
        self.before_first()
        for inputs, labels in super().__iter__():
            say("batch", tokens=inputs["input"][:, 0].tolist())
            yield inputs, labels


def main() -> None:
    parser = train_torchtitan.parser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--theirs", action="store_true", help="with --plain: save with torchtitan's checkpointer")
    parser.add_argument("--stop-after", type=int, help="end after this step, as if killed")
    parser.add_argument("--preemption", action="store_true")
    parser.add_argument("--fail-first", action="store_true", help="report an error in the first step")
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    config = train_torchtitan.configuration(options)
    config.metrics = PrintedMetrics.Config(log_freq=1)
    config.dataloader = PrintedLoader.Config()
    if options.plain:
        config.checkpoint = CheckpointManager.Config(enable=options.theirs, interval=options.save_every)
    else:
        config.checkpoint.handle_preemption = options.preemption
    PrintedMetrics.last_step = options.stop_after
    config.lr_scheduler.warmup_steps = options.warmup
    trainer = config.build()
    if "NO_EXPORT" in os.environ:  # no option: a kept state belongs to one command

        def fail(_step: int) -> None:
            trainer.checkpointer.manager._replica.keeping._wait_until_idle()
            raise OSError("No space left on device")

        trainer.checkpointer._save_last_step = fail
    if options.fail_first:
        error = OSError("the network is down")
        PrintedLoader.before_first = staticmethod(lambda: trainer.ft_manager.manager.report_error(error))
    train_torchtitan.reduce_on_cpus(trainer.model_parts[0])
    say("ready")
    trainer.train()
    weights = f"{state_digest(trainer.model_parts[0].state_dict()):016x}"
    # Of the groups, torchtitan's own load changes the order of the settings.
    moments = trainer.optimizers.optimizers[0].state_dict()["state"]
    optimizer = f"{state_digest(moments):016x}"
    say("end", weights=weights, optimizer=optimizer, step=trainer.step, tokens=trainer.ntokens_seen)
    trainer.close()


if __name__ == "__main__":
    main()
