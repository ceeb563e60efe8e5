"""Lets a newcomer take part at once, while it receives the state: no replica waits for it (`Follower`).

Without this, all replicas of a quorum wait until a newcomer has the whole state. A newcomer that follows makes this:

1. At its first step boundary, it receives only the part of the state that no optimizer computes (schedulers, counters,
   buffers). From then on it takes part in each step, and contributes zeros.
2. A thread receives the rest of that boundary's state, which a source serves from a copy. Meanwhile the newcomer
   records the averaged gradients and the hyperparameters of each step, and leaves its optimizers' steps empty.
3. Then that thread makes the recorded steps (`manager.state.replay`).
4. At the boundary at which no recorded step is left, the newcomer receives once more what no optimizer computes. From
   then on its optimizers step as those of the others do.
5. At the next boundary, all replicas digest their states. If the newcomer's digest is that of the others, it
   contributes from this step on. If not, it heals like any replica that is behind.

`manager.quorum.decision` decides which replicas follow. After any failure on the way, the newcomer heals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ft_transport import AllBut, FetchTimeout, TransportError
from manager.errors import ManagerError, QuorumError
from manager.lifecycle import OwnedExecutor
from manager.quorum.decision import Decision, Heals
from manager.quorum.quorum_round import Participant, format_error
from manager.quorum.reports import Following
from manager.snapshots.state_parts import has_torch_state
from manager.state.optimizer_guard import StateObserver
from manager.state.optimizer_states import Memory, memory_at, memory_of, memory_of_optimizers
from manager.state.parameter_order import MANAGER_KEY, USER_KEY
from manager.state.replay import (
    Replay,
    ReplayRefusedError,
    aliased,
    check_replayable,
    load_optimizer_states,
    load_rest,
)

logger = logging.getLogger(__name__)

_MAX_REST_BYTES: Final = 64 << 20
"""All replicas wait for what no optimizer computes. If that is more, the newcomer heals."""
_LEAST_BYTES: Final = 64 << 20
"""The transfer of a smaller state takes less than a step as a rule."""


class Follower(StateObserver):
    """Receives the state of other replicas while they train. Only the training thread may call it, except `failed`.

    Args:
        participant: This replica and its quorum.
        replay_bytes: Largest size of the recorded gradients; ``None`` to heal instead.

    Attributes:
        following: How this replica gets the state.
        refusal: Why this replica does not follow if it is behind; empty if it may, or if it has not been asked.
    """

    def __init__(self, participant: Participant, replay_bytes: int | None) -> None:
        self._participant = participant
        self._state = participant.state
        self._max_bytes = replay_bytes
        self._may_begin = replay_bytes is not None
        self.following = Following.NO
        self.refusal = ""
        self._replay: Replay | None = None
        self._pool: OwnedExecutor | None = None
        self._job: Future[Any] | None = None
        self._has_base = False
        self._failure = ""
        self._is_loading = False
        self._began_s = 0.0

    def report(self) -> Following:
        """Return how this replica gets the state, for the next quorum."""
        if self.following is not Following.NO or not self._may_begin:
            return self.following
        state = self._state
        if state.partial is not None or state.steps.num_committed or self._participant.peers.knows_most:
            return Following.NO
        try:
            self._check()
        except (ReplayRefusedError, ManagerError) as error:
            self.refusal = str(error)
            self._may_begin = False
            return Following.NO
        return Following.WOULD

    def begin_round(self) -> None:
        """At a step boundary, make the recorded steps, or find out that this replica cannot follow any more."""
        if self.following is Following.NO:
            return
        try:
            self._advance()
        except Exception as error:
            self.abandon(_reason_of(error))

    @property
    def must_wait(self) -> bool:
        """Whether a transfer still writes into the tensors, so that a heal has to wait."""
        return self._job is not None and not self._has_base and not self._job.done()

    def receive(self, decision: Decision, role: Heals) -> tuple[str, ...]:
        """Receive what no optimizer computes, and begin to follow, or to compare.

        Returns:
            The reasons of failures; empty after a success.
        """
        failures: list[str] = []
        state = self._state
        earlier = state.partial
        for source in role.sources:
            address = source.addresses[self._participant.membership.group_rank]
            # If anything raises before the end, the tensors may have any values.
            state.mark_partial(decision.step, "receiving what no optimizer computes was interrupted")
            try:
                self._receive_rest(address, decision)
            except (TransportError, ManagerError) as error:
                failures.append(f"{source.replica_id} at {address}: {format_error(error)}")
                if isinstance(error, TransportError) and not getattr(error, "destination_touched", False):
                    state.partial = earlier
                continue
            if self.following is Following.CAUGHT_UP:
                self.following = Following.COMPARES
            else:
                self._begin(address, decision)
            state.follows = True
            state.partial = None
            return ()
        return tuple(failures)

    def counted(self) -> None:
        """Note that the state was compared, and that this replica contributes from now on."""
        if self.following is Following.NO:
            return
        replay = self._replay
        assert replay is not None, "it has recorded steps"
        self._end()
        text = (
            f"followed for {time.monotonic() - self._began_s:.1f} s, made {replay.num_recorded} recorded steps, whose "
            f"gradients had at most {replay.peak_bytes} bytes"
        )
        if self._participant.healing is not None:
            self._participant.healing.note(replay=text)
        logger.info("%s: has the state of the others: %s", self._participant.name, text)

    def failed(self, reason: str) -> None:
        """Note, on any thread, why this replica cannot follow any more. It heals at its next step boundary."""
        if self.following is not Following.NO:
            self._failure = self._failure or reason

    def abandon(self, reason: str) -> None:
        """Stop following: this replica heals in its next quorum."""
        if self.following is Following.NO:
            return
        logger.warning("%s: no longer follows the other replicas, and heals: %s", self._participant.name, reason)
        if self._participant.healing is not None:
            self._participant.healing.note(replay=f"abandoned: {reason}")
        # First, in case a signal handler raises below.
        self._state.mark_partial(self._state.step, f"it followed the other replicas, until {reason}")
        if self._job is not None:
            self._job.exception()  # It writes into the tensors.
        self._end()

    def before_step(self, optimizer: Optimizer) -> None:
        """Record the step that an optimizer is about to make, and leave it empty."""
        replay = self._replay
        is_recording = self.following in (Following.RECORDS, Following.CAUGHT_UP)
        if not is_recording or self._failure or replay is None or self._state.registry.is_calling():
            return
        try:
            replay.record(optimizer)
            self._go_on(replay)
        except Exception as error:
            # The step is then made with any values: this replica heals.
            self.failed(_reason_of(error))

    def stepped(self, optimizer: Optimizer) -> None:
        """Give the gradients back after an empty step."""
        del optimizer
        if self._replay is not None:
            self._replay.give_back()

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Give the gradients back after a step that failed."""
        del error
        self.stepped(optimizer)

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Note that a closure made a step with gradients that were not recorded."""
        if self.following is not Following.NO:
            self.failed(f"a closure of {type(optimizer).__name__}.step() computed other gradients")

    def replaced(self) -> None:
        """Note that a state is loaded: the recorded steps do not begin at it."""
        if self.following is not Following.NO and not self._is_loading:
            self.failed("another state was loaded")

    def close(self, *, wait: bool) -> None:
        """End the thread, and warn if this replica never had the state.

        Args:
            wait: Whether to wait for a transfer in progress.
        """
        if self.following is not Following.NO:
            logger.error(
                "%s: this replica ends before it has the state: its weights are not those of this step. Do not save "
                "them, and check manager.is_participating() after the loop",
                self._participant.name,
            )
        if self._pool is not None:
            self._pool.shutdown(wait=wait)

    def _check(self) -> None:
        state = self._state
        with state.lock.read("size of the state"):
            content: Any = state.content()
            check_replayable(state, content[USER_KEY], self._participant.config.replay_optimizers)
            self._check_modules()
            held = memory_of_optimizers(state.optimizers())
            others = memory_of([content]) - held
        num_bytes, num_other_bytes = (sum(length for _, _, length in each) for each in (held, others))
        if num_bytes < _LEAST_BYTES:
            raise ReplayRefusedError(
                f"the optimizers' tensors have {num_bytes} bytes, weights and present states, less than {_LEAST_BYTES}"
            )
        if num_other_bytes > _MAX_REST_BYTES:
            raise ReplayRefusedError(f"{num_other_bytes} bytes of the state belong to no optimizer")

    def _check_modules(self) -> None:
        """Make sure that modules have no state but tensors, and that nothing but a step changes their parameters."""
        state, copier = self._state, self._participant.snapshots.copier
        for key, module in state.registry.holders(torch.nn.Module).items():
            if not all(map(has_torch_state, module.modules())):
                raise ReplayRefusedError(f"the module {key!r} has state functions of its own")
        optimizers = state.optimizers()
        if memory_of_optimizers(optimizers) - copier.guarded(optimizers):
            raise ReplayRefusedError("more than its step changes parameters of an optimizer (max_norm, a hook)")

    def _receive_rest(self, address: str, decision: Decision) -> None:
        participant, state = self._participant, self._state
        with state.lock.write("receiving what no optimizer computes", participant.config.timeout):
            into = state.content()
            keys = state.registry.holders(Optimizer)
            left_out = _LeftOut(
                tuple(f"{USER_KEY}.{key}.state." for key in keys), memory_of_optimizers(state.optimizers())
            )
            received: Any = self._transport().fetch(
                address,
                "latest",
                into=into,
                timeout=self._timeout(),
                check=partial(participant.peers.check_incoming, into=into, step=decision.step),
                known=AllBut(is_left_out=left_out, max_bytes=_MAX_REST_BYTES),
            )
            with self._loading():
                state.note_replaced()
                load_rest(state.registry, received.state[USER_KEY])
            state.load_counters(received.state[MANAGER_KEY])
        if state.lineage != decision.lineage:
            raise QuorumError(f"expected lineage {decision.lineage!r} of step {decision.step}, got {state.lineage!r}")

    @contextmanager
    def _loading(self) -> Iterator[None]:
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def _begin(self, address: str, decision: Decision) -> None:
        state = self._state
        assert self._max_bytes is not None, "a replica without it heals"
        self._began_s = time.monotonic()
        self._replay = Replay(state.optimizers(), self._max_bytes)
        self.following, self._may_begin = Following.RECORDS, False
        with state.lock.read("receiving the state"):
            into = aliased(state.content())
        self._pool = OwnedExecutor(1, "ft-transport-follow")
        self._job = self._pool.submit(
            self._transport().fetch, address, decision.step, into=into, timeout=self._timeout()
        )
        logger.info("%s: follows the other replicas from step %d on", self._participant.name, decision.step)

    def _advance(self) -> None:
        job, replay = self._job, self._replay
        if self._failure:
            if not self.must_wait:  # Passive until then, so that nobody waits.
                self.abandon(self._failure)
            return
        if self.following is Following.COMPARES or job is None or replay is None:
            return
        self.following = Following.RECORDS
        if not self._has_base:
            if not job.done():
                return
            self._load_base(job.result(), replay)
        if replay.num_steps_behind > 1:
            self._go_on(replay)
            return
        # The other replicas have just made the last step, and this replica makes it now.
        assert self._job is not None, "it is only replaced"
        self._job.result()
        replay.run()
        replay.finish()
        self._check_modules()
        self.following = Following.CAUGHT_UP
        # The next quorum forms before ``forward``, since this replica receives in it.
        self._participant.is_settled = False

    def _load_base(self, received: Any, replay: Replay) -> None:
        state, user = self._state, received.state[USER_KEY]
        with state.lock.write("loading the received state"):
            load_optimizer_states(state.registry, user)
        replay.begin()
        self._has_base = True

    def _go_on(self, replay: Replay) -> None:
        if self._has_base and self._pool is not None and self._job is not None and self._job.done():
            self._job.result()
            self._job = self._pool.submit(replay.run)

    def _end(self) -> None:
        self.following, self._state.follows = Following.NO, False
        self._replay = self._job = None
        self.close(wait=True)

    def _transport(self) -> Any:
        return self._participant.replica.transport

    def _timeout(self) -> FetchTimeout:
        config = self._participant.config
        return FetchTimeout(total=config.timeout, unreachable=config.connect_timeout)


def _reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, ReplayRefusedError) else format_error(error)


class _LeftOut:
    """Tells which tensors of a snapshot the optimizers' steps explain.

    Args:
        prefixes: The beginnings of the names of states that these optimizers may not have yet.
        stepped: The optimizers' memory.
    """

    def __init__(self, prefixes: tuple[str, ...], stepped: set[Memory]) -> None:
        self._prefixes = prefixes
        self._stepped = stepped

    def __call__(self, name: str, own: Sequence[torch.Tensor]) -> bool:
        """Return whether a step explains a tensor; see `AllBut`."""
        return name.startswith(self._prefixes) or any(memory_at(each) in self._stepped for each in own)
