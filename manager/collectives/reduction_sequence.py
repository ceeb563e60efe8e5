"""Checks that all members of a process group reduce the same tensors, before the tensors are sent.

If replicas reduced different tensors, they would average unrelated values. If the sizes differed, gloo would end the
process, because a check on one of gloo's threads fails. So no member sends a tensor before all members have announced
the same reductions.

The protocol has rounds. In a round, each member announces how many reductions it has begun, a digest of them, and
whether its step has ended. All members gather the announcements. If the numbers differ, each member also sends a digest
of only as many reductions as all members have begun. If the digests are equal, the members run these reductions;
otherwise, they search for the first reduction that differs, and fail. All members have the same announcements, so all
decide alike. A round costs one or two gathers of a few bytes, for any number of reductions.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.runtime.signal_safe import SafeCondition
from ft_transport.runtime.threads import SafeExecutor
from manager.collectives.managed_work import forget_frames
from manager.collectives.reductions import HALF_BYTES, Digest, Reduction, ReductionLog
from manager.errors import ReductionMismatchError

_ANNOUNCEMENT: Final = struct.Struct(f"<q?{2 * HALF_BYTES}s")
_DESCRIPTION_BYTES: Final = 256
"""Maximum length of the description of a reduction in a `ReductionMismatchError`."""
_LOOK_AFTER_S: Final = 0.05
"""Seconds after which a waiting thread checks its condition itself, because a signal handler may prevent a wake-up."""
_ON_HOST: Final = nullcontext()
_NO_NAME: Final = -(1 << 31)
"""Stands for a missing name; less than the hash of every name, and less than the negative of each hash."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A member's announcement of its reductions in a step.

    Attributes:
        num: Number of entries in the member's `ReductionLog`.
        is_last: Whether the member begins no further reduction in this step.
        digest: Digest of these entries.
    """

    num: int
    is_last: bool
    digest: Digest

    def encode(self) -> bytes:
        """Return the announcement as bytes. All announcements have the same size."""
        return _ANNOUNCEMENT.pack(self.num, self.is_last, self.digest.encode())

    @classmethod
    def decode(cls, encoded: bytes) -> Announcement:
        """Decode the result of `encode`."""
        num, is_last, digest = _ANNOUNCEMENT.unpack(encoded)
        return cls(num, is_last, Digest.decode(digest))


def is_cut_short(announced: Sequence[Announcement]) -> bool:
    """Return whether one member has ended its step with fewer reductions than another member has begun."""
    num = min(each.num for each in announced)
    return any(each.is_last and each.num == num for each in announced) and any(each.num > num for each in announced)


@dataclass(slots=True)
class _Pending:
    """A reduction that this member has begun.

    Attributes:
        tensor: The tensor to reduce; ``None`` after the process group has received it.
        options: Options for the process group.
        num_entries: Number of entries in the `ReductionLog` up to this reduction, inclusive.
        stream: The stream that computes the tensor; a null context for a tensor on the host.
        done: The event of that stream after which the result may be read; ``None`` on the host, and before the end.
    """

    tensor: torch.Tensor | None
    options: AllreduceOptions
    num_entries: int
    stream: AbstractContextManager[Any]
    done: Any = None


class ReductionSequence:
    """Runs the checked reductions of one step on one process group. The module's docstring describes the protocol.

    The training thread calls the public methods. A job on ``executor`` gathers announcements and reduces tensors, and
    ends when no reduction is left.

    Args:
        group: This package's or torchft's gloo group, with ``allreduce``, ``allgather`` and ``abort``. No other object
            may use it during the step.
        members: The members' names, in the order of their ranks.
        timeout: Longest wait for one collective.
        executor: An executor with one thread.

    Attributes:
        is_running: Whether the job has been submitted to the executor, and has not ended.
    """

    def __init__(self, group: Any, members: tuple[str, ...], *, timeout: timedelta, executor: SafeExecutor) -> None:
        self._group = group
        self._members = members
        self._timeout_s = timeout.total_seconds()
        self._executor = executor
        self._progress = SafeCondition()
        self._log = ReductionLog()
        self._pending: list[_Pending] = []
        self._num_done = 0
        self._num_compared = 0
        self._is_ended = False
        self._is_over = False
        self.is_running = False
        self._error: BaseException | None = None
        _living.add(self)

    def add(self, reduction: Reduction, tensor: torch.Tensor) -> QueuedReduction:
        """Begin to reduce ``tensor`` in place. The tensor must not change before a wait for the result has returned."""
        try:
            with self._progress:
                number = len(self._pending)
                self._log.add(reduction, tensor)
                stream = _ON_HOST if tensor.is_cpu else torch.accelerator.current_stream(tensor.device)
                self._pending.append(_Pending(tensor, reduction.options, len(self._log), stream))
        except BaseException:
            # A signal handler may have raised between these lines, so that the log has a reduction that is not pending.
            self.fail(RuntimeError("expected to begin a reduction, but an exception interrupted the call"))
            raise
        self._start()
        return QueuedReduction(self, number)

    def end(self) -> None:
        """Announce that this member begins no further reductions in this step."""
        with self._progress:
            self._is_ended = True
        self._start()

    def wait_for_end(self, timeout: timedelta | None = None) -> None:
        """Wait until all members have made the same reductions and have ended the step. Call `end` first.

        Raises:
            ReductionMismatchError: The members' reductions differ.
            Exception: A collective failed.
        """
        self._wait(lambda: self._is_over, "the other replicas to end their reductions", timeout)

    def wait_for(self, number: int, timeout: timedelta | None = None) -> None:
        """Wait for one reduction; ``number`` 0 is the first of the step. It raises the errors of `wait_for_end`.

        For a tensor on a device, the calling thread's current stream then waits for the result.
        """
        self._wait(lambda: self._num_done > number, f"reduction {number}", timeout)
        pending = self._pending[number]
        if pending.done is not None:
            torch.accelerator.current_stream(pending.done.device).wait_event(pending.done)

    def fail(self, error: BaseException) -> None:
        """Make all waits raise ``error``. Only the first call has an effect. Thread-safe."""
        with self._progress:
            if self._error is None:
                self._error = error
            for pending in self._pending:
                pending.tensor = None
            self._progress.notify_all()

    def abort(self) -> None:
        """Abort the process group, so that all waits fail. Thread-safe."""
        self.fail(RuntimeError("expected a working process group, got one that has been aborted"))
        self._group.abort()

    def _start(self) -> None:
        if self.is_running:
            return
        try:
            self.is_running = True
            self._executor.submit(self._run)
        except BaseException:
            # If this job was submitted nevertheless, a second job only finds nothing to do.
            self.is_running = False
            raise

    def _wait(self, is_done: Callable[[], bool], what: str, timeout: timedelta | None) -> None:
        # Twice the timeout of one collective: for a gather, and then a reduction.
        timeout_s = timeout.total_seconds() if timeout is not None else 2 * self._timeout_s
        end_s = time.monotonic() + timeout_s
        while True:
            with self._progress:
                if is_done():
                    return
                if self._error is not None:
                    raise self._error
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"expected {what} within {timeout_s:g} s")
                if self._progress.wait(min(left_s, _LOOK_AFTER_S)):
                    continue
            # A signal handler may have raised before `add` or `end` submitted the job.
            self._start()

    # --------------------------------------------------------------------------------------- on the executor's thread

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except BaseException as error:
            # Breaks a reference cycle: the error's frames refer to this object, which stores the error.
            forget_frames(error)
            self.fail(error)

    def _advance(self) -> bool:
        """Run one round of the protocol; return whether there was anything to announce."""
        with self._progress:
            num, is_last = len(self._log), self._is_ended
            if self._error is not None or self._is_over or (num == self._num_compared and not is_last):
                self.is_running = False
                return False
        own = Announcement(num, is_last, self._log.digest(num))
        announced = [Announcement.decode(each) for each in self._gather(own.encode())]
        num = min(each.num for each in announced)
        digests = [each.digest for each in announced]
        if any(each.num != num for each in announced):
            digests = [Digest.decode(each) for each in self._gather(self._log.digest(num).encode())]
        same_forms = num
        if len({each.forms for each in digests}) > 1:
            same_forms = self._first_other_form(num)
        if len({each.names for each in digests}) > 1 and (index := self._first_other_name(same_forms)) is not None:
            raise self._mismatch(index)
        if same_forms < num:
            raise self._mismatch(same_forms)
        if is_cut_short(announced):
            raise self._mismatch(num)
        self._reduce(num)
        if all(each.is_last and each.num == num for each in announced):
            with self._progress:
                self._is_over = True
                self._progress.notify_all()
        return True

    def _reduce(self, num: int) -> None:
        """Run the reductions among the first ``num`` entries, which all members have begun."""
        begun = []
        for pending in itertools.islice(self._pending, self._num_done, None):
            if pending.num_entries > num:
                break
            assert pending.tensor is not None, "a tensor is cleared only after its reduction has begun"
            # gloo orders its copies with the current stream, and each thread has another one.
            with pending.stream:
                begun.append((self._group.allreduce([pending.tensor], pending.options), pending))
            pending.tensor = None
        self._num_compared = num
        while begun:
            work, pending = begun.pop(0)
            with pending.stream as stream:
                work.wait()
            if stream is not None:
                pending.done = stream.record_event()
            with self._progress:
                self._num_done += 1
                self._progress.notify_all()

    def _first_other_form(self, num: int) -> int:
        """Return the index of the first entry in ``[_num_compared, num)`` whose form differs between members."""
        same, differing = self._num_compared, num
        while differing - same > 1:
            middle = (same + differing) // 2
            if len(set(self._gather(self._log.digest(middle).forms))) > 1:
                differing = middle
            else:
                same = middle
        return same

    def _first_other_name(self, num: int) -> int | None:
        """Return the index of the first entry whose name differs between members. A missing name matches all names."""
        if num == self._num_compared:
            return None
        own = self._log.names(self._num_compared, num)
        highest = torch.tensor([name or _NO_NAME for name in own] + [-name or _NO_NAME for name in own])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment] # declared as another type
        self._group.allreduce([highest], options).wait()
        largest, smallest = highest.view(2, -1)
        differing = ((largest != -smallest) & (largest != _NO_NAME)).nonzero()
        return self._num_compared + int(differing[0]) if len(differing) else None

    def _mismatch(self, index: int) -> ReductionMismatchError:
        own = self._log.describe(index).encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES, b"\0")
        described = [each.rstrip(b"\0").decode(errors="replace") for each in self._gather(own)]
        # The first member that raises the error ends the connections. So each waits until all have the descriptions.
        with contextlib.suppress(Exception):
            self._gather(b"over")
        return ReductionMismatchError(position=index, reductions=tuple(zip(self._members, described, strict=True)))

    def _gather(self, own: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        gathered = [torch.zeros_like(sent) for _ in self._members]
        self._group.allgather([gathered], [sent], AllgatherOptions()).wait()
        return [bytes(each.numpy()) for each in gathered]


class QueuedReduction(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """The ``Work`` object of one reduction in a `ReductionSequence`."""

    def __init__(self, sequence: ReductionSequence, number: int) -> None:
        super().__init__()
        self._sequence = sequence
        self._number = number

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor is reduced.

        Raises:
            ReductionMismatchError: The members' reductions differ.
            TimeoutError: The reduction was not done in time.
            Exception: The collective failed.
        """
        self._sequence.wait_for(self._number, timeout)
        return True


_living: Final[weakref.WeakSet[ReductionSequence]] = weakref.WeakSet()


def _abort_living() -> None:
    """Abort the running sequences when the interpreter ends, which would otherwise wait for the executors' threads."""
    for sequence in list(_living):
        if sequence.is_running:
            sequence.abort()


threading._register_atexit(_abort_living)  # type: ignore[attr-defined] # as in ``signal_safe``
