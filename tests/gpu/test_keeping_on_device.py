"""A state on a device outlives its process, exactly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from keepers import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KEEPING_TRAINER = Path(__file__).parents[1] / "workers" / "keeping_trainer.py"


def start(directory: Path) -> Trainer:
    variables = {**os.environ, "KEEPING_DEVICE": "cuda", "KEEPING_DIRECTORY": str(directory)}
    return Trainer(str(KEEPING_TRAINER), "2000", env=variables)


def test_a_restarted_process_has_the_state_of_the_dead_one(tmp_path: Path) -> None:
    trainer = start(tmp_path)
    digest = trainer.ask("train(3)")
    trainer.kill()
    successor = start(tmp_path)
    assert successor.ask("resume()") == (3, 3, "the keeper of this host", digest)
    again = successor.ask("train(2)")
    successor.kill()
    third = start(tmp_path)
    assert third.ask("resume()") == (5, 5, "the keeper of this host", again)
    third.run("manager.shutdown()")
    third.kill()
