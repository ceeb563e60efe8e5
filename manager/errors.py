"""The errors of the manager, as one tree.

    ManagerError
    ├── LockTimeoutError    (also a TimeoutError) other threads held the state lock until the deadline
    ├── LockOrderError      waiting for the state lock would deadlock, so the lock refuses at once
    ├── LockNotHeldError    a section of the state lock was released twice
    ├── RegistryError       a key is taken, unknown or missing, or the function under a key failed
    │   └── StateMismatchError   a peer's state does not fit the objects that are registered here
    ├── LoaderOrderError    batches were drawn before the step boundary, or from an outdated iterator
    ├── StateTornError      the replica has only part of a state and must not step
    ├── QuorumError         the replicas could not form a quorum
    │   ├── QuorumTimeoutError           (also a TimeoutError) a replica or rank did not arrive in time
    │   ├── LighthouseUnavailableError   torchft is not installed, or the Lighthouse does not answer
    │   ├── ReductionMismatchError       replicas began to reduce different tensors in one step
    │   └── StatesDivergedError          replicas have different states of one step, and no majority agrees
    │       └── HyperparametersDivergedError   their optimizers have different hyperparameters after one step
    ├── UnfinishedReductionError   a tensor was changed, replaced or reduced again before its reduction ended
    ├── RecoveryFailedError no live peer and no checkpoint has a state to recover
    ├── HealFailedError     every attempt to heal the replica failed
    ├── ManagerClosedError  the manager was shut down, or belongs to the process that forked this one
    ├── ReportedError       (never raised) the error that failed a step, as Manager.errored returns it
    └── CommitFailedError   too many steps in a row were not committed
        └── ReplicaFaultError   this replica's own errors failed the steps, so it leaves the job

A setting that cannot work raises ``ConfigurationError`` of ``ft_transport``; ``ConfigError`` is its older name. Every
error can be pickled, with its fields: an error that is sent to another process loses nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerProtocolError,
    RankGoneError,
    escape_controls,
)

ConfigError: Final = ConfigurationError

Kind = Literal["read", "write"]

_MAX_SHOWN = 5
_DOING: dict[Kind, str] = {"read": "reading", "write": "writing"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """One open section of the state lock: its purpose, its thread and its age.

    Attributes:
        kind: ``read`` or ``write``. A read section inside a write section counts as ``write``: it blocks all threads.
        what: The purpose of the section, as the code that opened it describes it.
        thread_name: Name of the thread that opened the section.
        thread_id: ``threading.get_ident()`` of the same thread.
        age_s: Seconds since the section was opened.
    """

    kind: Kind
    what: str
    thread_name: str
    thread_id: int
    age_s: float

    def __str__(self) -> str:
        """Return a clause that follows 'the lock is held'."""
        return f"for {_DOING[self.kind]} by thread {self.thread_name!r} ({self.what!r}) for {self.age_s:.1f} s"


class ManagerError(Exception):
    """Root of all errors that the manager raises."""

    def __str__(self) -> str:
        """Return the message, with control characters from peers escaped for terminals."""
        return escape_controls(super().__str__())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with its fields: the default ``__reduce__`` cannot pass keyword arguments on."""
        return _remake, (type(self), self.args, dict(self.__dict__))


def _remake(error_type: type[ManagerError], args: tuple[object, ...], fields: dict[str, object]) -> ManagerError:
    error = error_type.__new__(error_type, *args)
    error.__dict__.update(fields)
    return error


@dataclass(eq=False, repr=False, kw_only=True)
class LockTimeoutError(ManagerError, TimeoutError):
    """A thread could not take the state lock before its deadline.

    Attributes:
        wanted: The requested section, e.g. ``"write ('optimizer step')"``.
        waited_s: Seconds that the thread waited.
        holders: Every section that was open at the deadline.
    """

    wanted: str
    waited_s: float
    holders: tuple[LockHolder, ...]

    def __str__(self) -> str:
        """Return a message with the purpose, thread and age of every open section."""
        held = "; and ".join(str(holder) for holder in self.holders)
        state = f"the lock is held {held}" if held else "no thread holds the lock any more"
        return f"waited {self.waited_s:.1f} s to {self.wanted}; {state}"


@dataclass(eq=False, repr=False, kw_only=True)
class LockOrderError(ManagerError):
    """A thread requested a section of the state lock that would wait for another section of the same thread.

    Attributes:
        wanted: The requested section, e.g. ``"write ('optimizer step')"``.
        holders: The open sections of the calling thread.
    """

    wanted: str
    holders: tuple[LockHolder, ...]

    def __str__(self) -> str:
        """Return a message that names the sections that the thread must release first."""
        held = "; and ".join(str(holder) for holder in self.holders)
        return f"cannot {self.wanted} before this thread releases what it holds: the lock is held {held}"


@dataclass(eq=False, repr=False, kw_only=True)
class LockNotHeldError(ManagerError):
    """Code released a section of the state lock that is not open.

    Attributes:
        kind: ``read`` or ``write``.
        what: The purpose of the section.
    """

    kind: Kind
    what: str

    def __str__(self) -> str:
        """Return a message that names the section."""
        return f"expected an open {self.kind} section {self.what!r} to release, but it has been released already"


class RegistryError(ManagerError):
    """A key of the registry is taken, unknown or missing, or a registered state function failed.

    Attributes:
        reason: The message, which names the keys.
        keys: The keys that the message names.
    """

    def __init__(self, reason: str, *, keys: tuple[str, ...] = ()) -> None:
        """Set the attributes; see the class."""
        super().__init__(reason)
        self.reason = reason
        self.keys = keys


class StateMismatchError(RegistryError):
    """The registered objects cannot load a peer's state. Nothing was received, and another attempt would fail too."""


class LoaderOrderError(ManagerError):
    """The training loop drew a batch before the step boundary, or from an iterator that a load made outdated.

    Attributes:
        key: The key under which the data loader is registered.
    """

    def __init__(self, message: str, *, key: str) -> None:
        """Set the attributes; see the class."""
        super().__init__(message)
        self.key = key


@dataclass(eq=False, repr=False, kw_only=True)
class StateTornError(ManagerError):
    """The replica has only part of a state and must not step: a step would spread the damage to other replicas.

    Attributes:
        step: The step whose state the replica was receiving or loading.
        reason: Why receiving or loading failed.
    """

    step: int | str
    reason: str

    def __str__(self) -> str:
        """Return a message with the step, the reason and the remedy."""
        return (
            f"this replica holds only part of the state of step {self.step} and must not step until Manager.recover or "
            f"Manager.load has loaded a complete state: {self.reason}"
        )


class QuorumError(ManagerError):
    """The replicas could not form a quorum; the message names the present replicas and the missing replicas."""


class QuorumTimeoutError(QuorumError, TimeoutError):
    """A replica or rank did not arrive in time. It is a ``TimeoutError`` because torchft's ``Manager`` raises that."""


@contextmanager
def quorum_errors() -> Iterator[None]:
    """Return a context that turns errors of ``ft_transport`` about unresponsive ranks into a `QuorumError`."""
    try:
        yield
    except DeadlineExceededError as error:
        raise QuorumTimeoutError(str(error)) from error
    except (RankGoneError, PeerProtocolError) as error:
        raise QuorumError(str(error)) from error


class LighthouseUnavailableError(QuorumError):
    """torchft is not installed, or the Lighthouse does not answer."""


@dataclass(eq=False, repr=False, kw_only=True)
class StatesDivergedError(QuorumError):
    """Replicas have different states of one step, and no majority of them has the same state.

    Attributes:
        step: The committed step.
        replicas: Ids of the compared replicas.
        tensors: Paths of the tensors that differ; empty if the replicas could not exchange digests of their tensors.
        store_address: Address of the store through which the replicas exchange these digests.
    """

    step: int
    replicas: tuple[str, ...]
    store_address: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a message with the paths of the first few tensors."""
        shown = ", ".join(self.tensors[:_MAX_SHOWN]) or "some tensors"
        more = f" and {len(self.tensors) - _MAX_SHOWN} more" if len(self.tensors) > _MAX_SHOWN else ""
        return (
            f"expected the same state of step {self.step} on {list(self.replicas)}, and no majority of them agrees: "
            f"{shown}{more} differ; load a durable checkpoint from before"
        )


@dataclass(eq=False, repr=False, kw_only=True)
class ReductionMismatchError(QuorumError):
    """Replicas began to reduce different tensors in one step, or the same tensors in different orders.

    Attributes:
        position: Number of reductions before the mismatch. These reductions are equal on all replicas.
        reductions: Pairs of a replica's id and a description of the reduction that it began at ``position``.
    """

    position: int
    reductions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return a message with each reduction and the replicas that began it."""
        sides = "; ".join(f"{what} on {', '.join(replicas)}" for what, replicas in self._sides().items())
        return (
            f"expected all replicas to reduce the same tensors in the same order, and after {self.position} equal ones "
            f"they began different reductions: {sides}; reduce the same gradients on all replicas whatever their "
            "batches are, or call manager.average_gradients(model)"
        )

    def differs_from_most(self, replica_id: str) -> bool:
        """Return whether at most half of all replicas began the same reduction as ``replica_id``."""
        own = dict(self.reductions).get(replica_id, "")
        return 2 * len(self._sides().get(own, ())) <= len(self.reductions)

    def _sides(self) -> dict[str, list[str]]:
        sides: dict[str, list[str]] = {}
        for replica_id, what in self.reductions:
            sides.setdefault(what, []).append(replica_id)
        return sides


class UnfinishedReductionError(ManagerError):
    """A tensor was changed, replaced, freed or reduced again before its reduction ended."""


class HyperparametersDivergedError(StatesDivergedError):
    """Optimizers of different replicas have different hyperparameters after the same step.

    It is raised if no majority of the replicas agrees, or if the hyperparameters still differ after a heal.

    Attributes:
        tensors: Names of the hyperparameters that differ, each with its value on each replica.
    """

    def __str__(self) -> str:
        """Return a message with the values and the usual causes."""
        shown = "; ".join(self.tensors[:_MAX_SHOWN]) or "which ones is not known"
        more = f"; and {len(self.tensors) - _MAX_SHOWN} more" if len(self.tensors) > _MAX_SHOWN else ""
        return (
            f"expected the same hyperparameters of optimizers after step {self.step} on {list(self.replicas)}, got "
            f"different ones: {shown}{more}; give all replicas the same settings, register every learning rate "
            "scheduler (manager.register('scheduler', scheduler)), and step it after each commit on all of them"
        )


class RecoveryFailedError(ManagerError):
    """Neither a live peer nor a durable checkpoint could provide a state."""


@dataclass(eq=False, repr=False, kw_only=True)
class HealFailedError(ManagerError):
    """The replica could not heal, and makes no further attempt.

    Attributes:
        step: The step whose state the last attempt tried to receive.
        reasons: For each attempt, why it failed, with the address of the source.
    """

    step: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return a message with all reasons."""
        times = "once" if len(self.reasons) == 1 else f"{len(self.reasons)} times"
        return f"healing for step {self.step} failed {times}: " + "; ".join(self.reasons)


class ManagerClosedError(ManagerError):
    """The manager was shut down, or belongs to the process that forked this one."""


class ReportedError(ManagerError):
    """The error that failed a step, as ``Manager.errored`` returns it. In torchft: ``ExceptionWithTraceback``.

    Attributes:
        original_exception: The reported exception.
        stack_trace: The formatted traceback of the reported exception.
    """

    def __init__(self, error: Exception) -> None:
        """Set the attributes; see the class."""
        super().__init__(error)
        self.original_exception = error
        self.stack_trace = "".join(traceback.format_exception(error))

    def __str__(self) -> str:
        """Return the type and message of the reported exception."""
        return f"{type(self.original_exception).__name__}: {self.original_exception}"


@dataclass(eq=False, repr=False, kw_only=True)
class CommitFailedError(ManagerError, RuntimeError):
    """Too many steps in a row were not committed.

    Attributes:
        step: The last committed step.
        num_failures: How many times in a row the step after ``step`` was not committed.
        reasons: Why the last attempt was not committed.
    """

    step: int
    num_failures: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return a message with the number of failures and the reasons of the last failure."""
        why = "; ".join(self.reasons) or "another rank of this replica refused"
        return f"the step after {self.step} was not committed {self.num_failures} times in a row; the last time: {why}"


class ReplicaFaultError(CommitFailedError):
    """This replica's own errors failed several steps, so it leaves the job and lets the other replicas continue.

    Attributes:
        step: The last committed step.
        num_failures: How many attempts at the step after ``step`` failed because of this replica's own errors.
        reasons: The errors that failed the last attempt.
    """

    def __str__(self) -> str:
        """Return a message with the number of failures and the errors."""
        return (
            f"errors of this replica's own failed the step after {self.step} {self.num_failures} times; it leaves, so "
            f"that the other replicas can continue; end this process, correct the cause, and start the process again: "
            f"{'; '.join(self.reasons)}"
        )
