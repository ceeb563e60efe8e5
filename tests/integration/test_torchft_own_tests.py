"""The tests that torchft ships pass with our Manager, transport and lock in the place of torchft's."""

from __future__ import annotations

import pytest
from torchft_upstream import LEFT_OUT, MODULES, run_apart

pytest.importorskip("torchft")
pytest.importorskip("parameterized")  # which they need

_DILOCO = "torchft.local_sgd_integ_test"
_MANAGER = "torchft.manager_integ_test"
_RACY = (
    # Where its third replica asks when the two others have finished already, it waits in vain: with torchft's Manager
    # too (`make torchft-tests`), now and then, on a busy machine mostly.
    f"{_DILOCO}.LocalSGDIntegTest.test_streaming_diloco_upscale",
    # Its replicas are threads, which share torch's generator: one may draw a batch between another's seed and the
    # weights that are to come of it, and nothing makes these equal afterwards.
    f"{_MANAGER}.ManagerIntegTest.test_ddp_skip_init_sync",
)
_NUM_MORE_TRIES = 2
# Its replica waits for the heartbeats of two others that have died, with torchft's Manager too.
_MULTI_RANK = f"-{_MANAGER}.ManagerIntegTest.test_ddp_recovery_multi_rank"

# torchft-nightly's reason to skip tests of process groups that torch reconfigures, with a torch before 2.14.
_NEEDS_NEWER_TORCH = "requires native process group reconfiguration"


def _check(*modules: str) -> None:
    outcomes = run_apart("ours", modules, 110.0)
    for test in [test for test, outcome in outcomes.items() if outcome["outcome"] == "failed"]:
        for _ in range(_NUM_MORE_TRIES if test.startswith(_RACY) else 0):
            if outcomes[test]["outcome"] == "failed":
                module, _class, _name = test.rsplit(".", 2)
                outcomes[test] = run_apart("ours", (module, f"+{test}"), 60.0)[test]
    failed = {test: outcome["why"] for test, outcome in outcomes.items() if outcome["outcome"] == "failed"}
    assert not failed, "\n".join(f"{test}: {why}" for test, why in failed.items())
    # Each that is not run is listed with its reason, and none is listed that is not there.
    not_passed = {test: outcome for test, outcome in outcomes.items() if outcome["outcome"] != "passed"}
    left_out = {test for test, outcome in not_passed.items() if outcome["why"] != _NEEDS_NEWER_TORCH}
    assert left_out == {test for test in LEFT_OUT if test.startswith(modules)}
    assert len(outcomes) > len(left_out)


def test_those_of_manager_wrappers_transport_and_lock_pass() -> None:
    _check(*(module for module in MODULES if module != _DILOCO), _MULTI_RANK)


@pytest.mark.long
@pytest.mark.parametrize("module", [_DILOCO, _MANAGER])
def test_those_that_take_longer_pass(module: str) -> None:
    _check(module)
