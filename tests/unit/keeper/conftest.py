"""Trainers of `kept_trainer`, and the file in which their keepers' duties take notes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import kept_trainer
import pytest
from keepers import Notes, Trainer, is_alive, wait_until


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    """The keepers that are still there in the end are killed."""
    found = Notes(tmp_path / "notes")
    yield found
    keepers = {int(pid) for _, _, pid in found.lines()}
    for pid in keepers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, keepers)))


@pytest.fixture
def start(notes: Notes) -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def start(name: str, *slots: str) -> Trainer:
        trainers.append(Trainer(kept_trainer.__file__, str(notes.path), name, *slots))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.kill()


@pytest.fixture
def slot() -> str:
    """Names a duty that a successor can inherit."""
    return uuid4().hex
