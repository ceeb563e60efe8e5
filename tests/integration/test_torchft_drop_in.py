"""HTTPTransport in the place of torchft's own, under torchft's Manager."""

from __future__ import annotations

import inspect

import pytest
from torchft_upstream import run_apart

from ft_transport import HTTPTransport


def test_it_has_every_method_with_the_arguments_that_torchft_gives() -> None:
    upstream = pytest.importorskip("torchft.checkpointing.transport", exc_type=ImportError)
    for name, method in inspect.getmembers(upstream.CheckpointTransport, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(HTTPTransport, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_a_replica_under_torchfts_manager_heals_through_it(torchft_ready: None) -> None:
    """Runs a test that torchft ships, in which one of two replicas fails at step 2."""
    pytest.importorskip("parameterized")  # which it needs
    module = "torchft.manager_integ_test"
    test = f"{module}.ManagerIntegTest.test_ddp_recovery_0_async_quorum"
    outcome = run_apart("transport", [module, f"+{test}"], 100.0)[test]
    assert outcome["outcome"] == "passed", outcome["why"]
