"""Runs tests that torchft ships (``torchft/*_test.py`` in its wheel), with classes of ours in the place of torchft's.

``python torchft_upstream.py ours|transport|torchft MODULE... -TEST...`` runs modules without the tests after a dash,
and prints one JSON object: by test, its outcome, why, and how many seconds it took. ``transport`` is ours under
torchft's Manager. ``--shuffle=SEED`` runs them in another order.
``python torchft_upstream.py compare [ROUNDS]`` runs each module with either, in turns, and says which tests take longer
with ours than with torchft's. Each round has an order of its own: a client of a ``TCPStore`` looks names up, and a
resolver that lets one in 25 wait for 5 seconds would otherwise hit the same tests in every round.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import sys
import time
import traceback
import unittest
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any, Final, TypeVar

import torch
from programs import run as run_program

T = TypeVar("T")

ALLOWED_S: Final = 0.5
"""How much longer a test may take with ours than with torchft's."""

MODULES: Final = (
    "torchft.manager_integ_test",
    "torchft.ddp_test",
    "torchft.optim_test",
    "torchft.data_test",
    "torchft.local_sgd_test",
    "torchft.local_sgd_integ_test",
    "torchft.checkpointing.http_transport_test",
    "torchft.checkpointing.rwlock_test",
)

_SHUFFLE: Final = "--shuffle="
_GPU: Final = "needs GPUs"
_TORCHCOMMS: Final = "needs torchcomms, for GPUs"

LEFT_OUT: Final = {
    **{
        f"torchft.manager_integ_test.ManagerIntegTest.{name}": why
        for name, why in {
            "test_ddp_healthy_torchcomms": _TORCHCOMMS,
            "test_ddp_recovery_torchcomms": _TORCHCOMMS,
            "test_manager_allreduce_0": _GPU,
            "test_quorum_timeout": "expects the text of a gRPC status where ours says for which rank it waited",
        }.items()
    },
    **{
        f"torchft.checkpointing.http_transport_test.TestHTTPTransport.{name}": why
        for name, why in {
            "test_checkpoint_server_0_no_chunks": "expects the errors of urllib, which ours does not use",
            "test_checkpoint_server_1_chunked": "expects the errors of urllib, which ours does not use",
            "test_checkpoint_server_locking": "looks at the private lock and flags of torchft's server",
            "test_multi_http_transport_cuda": _GPU,
        }.items()
    },
}
"""Which of their tests do not fit, and why."""


class LockOfOurs:
    """Our lock behind the methods of torchft's (``torchft/checkpointing/_rwlock.py``), which belong to no thread.

    Ours belongs to threads, and nests in them: each section is opened on a thread that has no other.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        from manager.state.lock import StateLock

        self._lock = StateLock(timeout=timedelta(seconds=timeout))
        self._sections: dict[str, list[Any]] = {"read": [], "write": []}

    def _acquire(self, kind: str) -> None:
        acquire = self._lock.acquire_read if kind == "read" else self._lock.acquire_write
        with ThreadPoolExecutor(1) as pool:
            self._sections[kind].append(pool.submit(acquire, "upstream's test").result())

    def r_acquire(self) -> None:
        self._acquire("read")

    def w_acquire(self) -> None:
        self._acquire("write")

    def r_release(self) -> None:
        self._sections["read"].pop().release()

    def w_release(self) -> None:
        self._sections["write"].pop().release()

    @contextmanager
    def r_lock(self) -> Iterator[None]:
        self.r_acquire()
        yield
        self.r_release()

    @contextmanager
    def w_lock(self) -> Iterator[None]:
        self.w_acquire()
        yield
        self.w_release()

    def w_locked(self) -> bool:
        return any(holder.kind == "write" for holder in self._lock.holders())


def substitute() -> None:
    """Put ours in torchft's place, before any of its tests is imported."""
    import torchft.checkpointing._rwlock
    import torchft.checkpointing.http_transport
    import torchft.manager

    from ft_transport import HTTPTransport
    from manager import Manager

    torchft.manager.Manager = Manager
    torchft.checkpointing.http_transport.HTTPTransport = HTTPTransport
    torchft.checkpointing._rwlock.RWLock = LockOfOurs


def substitute_transport() -> list[int]:
    """Replace torchft's transport, but not its Manager; return the list to which received steps are appended."""
    import torchft.manager

    from ft_transport import HTTPTransport

    received: list[int] = []

    class Recording(HTTPTransport[T]):  # torchft subscripts it
        def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
            state = super().recv_checkpoint(src_rank, metadata, step, timeout)
            received.append(step)
            return state

    torchft.manager.HTTPTransport = Recording
    return received


def tests_of(module: Any) -> unittest.TestSuite:
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    for name, function in vars(module).items():
        # Those of the lock are for pytest.
        if name.startswith("test_") and callable(function):
            case = unittest.FunctionTestCase(function)
            case.id = lambda name=name: f"{module.__name__}.{name}"
            suite.addTest(case)
    return suite


class Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._start_s = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's
        super().startTest(test)
        # Some of them train weights at random until they have changed.
        torch.manual_seed(0)
        self._start_s = time.perf_counter()
        self.outcomes[test.id()] = {"outcome": "passed", "why": ""}

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's
        super().stopTest(test)
        self.outcomes[test.id()]["seconds"] = round(time.perf_counter() - self._start_s, 3)

    def _note(self, test: unittest.TestCase, outcome: str, why: str) -> None:
        self.outcomes.setdefault(test.id(), {"seconds": 0.0}).update(outcome=outcome, why=why)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 - unittest's
        self._note(test, "failed", "".join(traceback.format_exception(*err)))

    addError = addFailure  # noqa: N815 - unittest's

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 - unittest's
        self._note(test, "skipped", reason)


def run(whose: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Run the modules in this process, without the tests named behind a ``-``, or with those behind a ``+`` alone."""
    import torchft.manager  # noqa: F401 - before ours

    received = substitute_transport() if whose == "transport" else None
    if whose == "ours":
        substitute()
    result = Result()
    seeds = [name.removeprefix(_SHUFFLE) for name in names if name.startswith(_SHUFFLE)]
    chosen = {name.removeprefix("+") for name in names if name.startswith("+")}
    for name in (name for name in names if not name.startswith(("-", "+"))):
        tests = list(_flat(tests_of(importlib.import_module(name))))
        if seeds:
            random.Random(seeds[0]).shuffle(tests)
        for test in tests:
            if f"-{test.id()}" in names or (chosen and test.id() not in chosen):
                continue
            if test.id() in LEFT_OUT:
                result.outcomes[test.id()] = {"outcome": "left out", "why": LEFT_OUT[test.id()], "seconds": 0.0}
            else:
                test(result)
    assert received is None or max(received, default=0) >= 2, f"it healed at steps {received}"
    return result.outcomes


def run_apart(whose: str, names: Iterable[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Run the modules in a process of their own, which keeps what upstream's tests leave behind."""
    done = run_program([sys.executable, __file__, whose, *names], timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-8000:]
    outcomes: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def compare(num_rounds: int) -> bool:
    """Print how long each test takes with either, the shortest of the rounds.

    Returns:
        Whether all are short enough, and none failed that has not failed with torchft's own Manager as well.
    """
    seconds: dict[str, dict[str, list[float]]] = {"ours": {}, "torchft": {}}
    failed: dict[str, set[str]] = {"ours": set(), "torchft": set()}
    is_fine = True
    for module, (whose, by_test), number in product(MODULES, seconds.items(), range(num_rounds)):
        for test, outcome in run_apart(whose, [module, f"{_SHUFFLE}{number}"], 600.0).items():
            if outcome["outcome"] in {"passed", "left out"}:
                by_test.setdefault(test, []).append(outcome["seconds"])
            else:
                failed[whose].add(test)
                print(f"{outcome['outcome']} with {whose}: {test}: {outcome['why'][-500:]}")
    for test in sorted(failed["ours"] - failed["torchft"]):
        is_fine = False
        print(f"failed with ours alone: {test}")
    print("  ours  torchft")
    for test, ours in seconds["ours"].items():
        theirs = seconds["torchft"].get(test)
        is_slow = theirs is not None and min(ours) > min(theirs) + ALLOWED_S
        is_fine = is_fine and not is_slow
        left_out = f"left out: {LEFT_OUT[test]}" if test in LEFT_OUT else ""
        their_s = f"{min(theirs):8.3f}" if theirs is not None else "  failed"
        print(f"{min(ours):6.3f} {their_s}  {test} {left_out}{' SLOWER' if is_slow else ''}")
    return is_fine


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flat(each)
        else:
            yield each


def main(whose: str, *arguments: str) -> None:
    if whose == "compare":
        sys.exit(0 if compare(int(arguments[0]) if arguments else 3) else 1)
    outcomes = run(whose, list(arguments))
    logging.shutdown()
    print(json.dumps(outcomes))
    sys.stdout.flush()
    # Threads of upstream's tests may not end.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
