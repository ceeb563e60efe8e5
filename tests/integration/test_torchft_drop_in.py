"""HTTPTransport in the place of torchft's own: upstream's test of transports, and upstream's Manager."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import run as run_program

WORKERS = Path(__file__).parents[1] / "workers"

UPSTREAM_TEST = """
import sys
from datetime import timedelta
from unittest import TestCase
import torch
from torchft.checkpointing.transport_test import run_multi_recovery_test
from ft_transport import HTTPTransport, TransportSettings

num_chunks = int(sys.argv[1])
run_multi_recovery_test(
    TestCase(),
    lambda rank, world_size: HTTPTransport(
        timedelta(seconds=10), num_chunks, settings=TransportSettings(host="127.0.0.1")
    ),
    torch.device("cpu"),
)
print("passed")
"""


def run(*arguments: str) -> str:
    """Runs Python in a process of its own: torchft and torch.distributed keep threads, sockets and groups."""
    done = run_program([sys.executable, *arguments], timeout=100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_upstreams_own_test_of_a_transport_passes(num_chunks: int) -> None:
    pytest.importorskip("torchft.checkpointing.transport_test", exc_type=ImportError)
    assert run("-c", UPSTREAM_TEST, str(num_chunks)).splitlines()[-1] == "passed"


def test_it_has_every_method_with_the_arguments_that_torchft_gives() -> None:
    import inspect

    upstream = pytest.importorskip("torchft.checkpointing.transport", exc_type=ImportError)
    from ft_transport import HTTPTransport

    for name, method in inspect.getmembers(upstream.CheckpointTransport, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(HTTPTransport, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_a_replica_under_torchfts_manager_heals_through_it(torchft_ready: None) -> None:
    outcome = json.loads(run(str(WORKERS / "healing_replicas.py")).splitlines()[-1])

    assert outcome["digests"][0] == outcome["digests"][1]
    # One replica starts from the other's weights, and heals again after it failed.
    assert 0 in outcome["received_steps"]
    assert max(outcome["received_steps"]) >= 2
