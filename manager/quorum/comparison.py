"""Digests the tensors and values that optimizers and schedulers change, for comparison between replicas.

A background thread reads the tensors while forward and backward run; a read section keeps optimizers from changing them
meanwhile. Reading takes about 0.1 s for each GB on one core, once for each comparison; a longer step does not wait.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Final

from torch.optim import Optimizer

from ft_transport import TransportError
from ft_transport.state.state_digest import TensorDigests
from manager.errors import LockTimeoutError, ManagerError
from manager.lifecycle import OwnedExecutor
from manager.quorum.reports import Claim
from manager.quorum.round import QuorumRound
from manager.snapshots.boundary_copy import BoundaryCopier
from manager.snapshots.requests import BOUNDARY_TIMEOUT
from manager.state.lock import Section, StateLock
from manager.state.optimizer_states import belongs_to, memory_at, parameters_of

logger = logging.getLogger(__name__)

_MAX_SUSPECTED: Final = 3
"""After this number of suspected steps without a difference, further ones are trusted."""


class StateComparison:
    """Digests a replica's state at compared boundaries. For the training thread alone.

    Args:
        lock: The lock around the state.
        copier: Identifies memory that only optimizers and write sections change; other tensors are not compared.
        state: Calls the state functions.
    """

    def __init__(self, *, lock: StateLock, copier: BoundaryCopier, state: Callable[[], object]) -> None:
        self._lock = lock
        self._copier = copier
        self._state = state
        self._pool: OwnedExecutor | None = None
        self._pending: tuple[int, str, Future[dict[str, int]]] | None = None
        self.is_wanted = False
        """Whether to compare the next boundary, whichever step it is."""
        self._num_suspected = 0

    def suspect(self, reason: str, current: QuorumRound) -> None:
        """Compare the next boundary, and log the reason, if several replicas make a step that may differ.

        Args:
            reason: Why the step may differ.
            current: The step.
        """
        decision = current.decision
        if decision is None or decision.num_participants < 2 or self._num_suspected == _MAX_SUSPECTED:
            return
        if not self._num_suspected:
            logger.warning(
                "%s; the replicas differ unless they are the same on all, so the states are compared after this step",
                reason,
            )
        self._num_suspected += 1
        self.is_wanted = True

    def begin(self, step: int, lineage: str, optimizers: Sequence[Optimizer]) -> None:
        """Begin to digest the state of this boundary. What cannot be digested is logged, and not compared."""
        self.is_wanted = False
        section: Section | None = None
        try:
            if self._lock.write_owned():
                return
            section = self._lock.acquire_read(f"comparing step {step}", BOUNDARY_TIMEOUT, detached=True)
            state = self._state()
            guarded = self._copier.guarded(optimizers) | self._copier.stable(state)
            check = self._copier.watch([each for each in parameters_of(optimizers) if memory_at(each) in guarded])
            digests = TensorDigests(state, belongs_to(guarded, at_least_bytes=0))
            if self._pool is None:
                self._pool = OwnedExecutor(1, "ft-transport-compare")
            values = {f"{key} (values)": _digest_of_values(each) for key, each in self._copier.values(state).items()}
            self._pending = step, lineage, self._pool.submit(_compute, digests, values, check, section)
            section = None
        except (TransportError, ManagerError) as error:
            level = logging.DEBUG if isinstance(error, LockTimeoutError) else logging.WARNING
            logger.log(level, "step %d is not compared with the other replicas': %s", step, error)
        finally:
            if section is not None and section.is_open:
                section.release()

    def claim(self, timeout: timedelta) -> Claim:
        """Return the digest of the last compared boundary; waits for it."""
        table = self.table(timeout)
        if table is None or self._pending is None:
            return Claim()
        step, lineage, _ = self._pending
        ordered = sorted(table.items())
        return Claim(
            step=step,
            lineage=lineage,
            tensors=_digest([name for name, _ in ordered]),
            digest=_digest([digest for _, digest in ordered]),
        )

    def table(self, timeout: timedelta) -> dict[str, int] | None:
        """Return the digest of each tensor by path; ``None`` without a compared boundary."""
        if self._pending is None:
            return None
        step, _, future = self._pending
        try:
            error = future.exception(timeout.total_seconds())
        except FutureTimeoutError:
            error = ManagerError(f"no digest in {timeout.total_seconds():g} s")
        if error is None:
            return future.result()
        logger.warning("step %d is not compared with the other replicas': %s", step, error)
        self._pending = None
        return None

    def forget(self) -> None:
        """Discard the last digest: another state has been loaded."""
        self._pending = None

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _digest(values: Sequence[object]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def _digest_of_values(values: object) -> int:
    return int(_digest(list(_leaves(values, ""))), 16)


def _leaves(values: object, path: str) -> Iterator[str]:
    """Yield path and text of plain values. The text of other objects may contain their address."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            yield from _leaves(value, f"{path}.{index}")
    elif isinstance(values, (bool, int, float, str, type(None))):
        yield f"{path}={values!r}"


def _compute(
    digests: TensorDigests, values: dict[str, int], check: Callable[[], None], section: Section
) -> dict[str, int]:
    try:
        computed = {**digests.compute(), **values}
        check()
        return computed
    finally:
        section.release()
