"""The errors of the manager, as one tree.

    ManagerError
    ├── LockTimeoutError    (also a TimeoutError) the state lock stayed held until the deadline
    ├── LockOrderError      the wait asked for could only end in a deadlock, so it is refused at once
    ├── LockNotHeldError    a section of the state lock was released twice
    ├── RegistryError       a key is taken, unknown or missing, or the function under a key failed
    │   └── StateMismatchError   a peer's state does not fit what is registered here
    ├── LoaderOrderError    a data loader is ahead of the step boundary, or behind the state that was loaded
    ├── StateTornError      the replica holds part of a state and must not step
    ├── QuorumError         the replicas could not be brought together
    │   ├── LighthouseUnavailableError   torchft is not installed, or the Lighthouse does not answer
    │   ├── ReductionMismatchError       replicas began to reduce different tensors in one step
    │   └── StatesDivergedError          replicas hold different states of one step, and no majority agrees
    │       └── HyperparametersDivergedError   their optimizers have different hyperparameters after one step
    ├── UnfinishedReductionError   a tensor was changed, replaced or reduced again before its reduction ended
    ├── RecoveryFailedError no live peer and no checkpoint has a state to recover
    ├── HealFailedError     the replica could not be healed, however often it was tried
    ├── ManagerClosedError  the manager was shut down, or is one of the process that forked this one
    ├── ReportedError       (never raised) what spoiled a step, as Manager.errored returns it
    └── CommitFailedError   so many steps in a row were not committed that the run is given up
        └── ReplicaFaultError   this replica's own errors did so, and the others go on without it

A setting that cannot work is a ``ConfigurationError`` of ``ft_transport``, here as there; ``ConfigError`` is its older
name. The fields are attributes, the sentence is made by ``str()``, and every error survives pickling, so that one can
cross a process boundary without losing what it knows.
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
    """One open section of the state lock at the time of a query.

    Attributes:
        kind: The section's hold on the lock. A read nested in a write section counts as ``write``, its effect on other
            threads.
        what: The purpose, in the words of the code that opened it.
        thread_name: Name of the thread that opened it.
        thread_id: ``threading.get_ident()`` of that thread.
        age_s: Seconds since it was opened.
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
        """Pickle by fields: the default way cannot pass the constructors' keywords."""
        return _remake, (type(self), self.args, dict(self.__dict__))


def _remake(error_type: type[ManagerError], args: tuple[object, ...], fields: dict[str, object]) -> ManagerError:
    error = error_type.__new__(error_type, *args)
    error.__dict__.update(fields)
    return error


@dataclass(eq=False, repr=False, kw_only=True)
class LockTimeoutError(ManagerError, TimeoutError):
    """The state lock could not be taken before the deadline.

    Attributes:
        wanted: The requested section, e.g. ``"write ('optimizer step')"``.
        waited_s: Seconds that it waited.
        holders: Every open section at the deadline.
    """

    wanted: str
    waited_s: float
    holders: tuple[LockHolder, ...]

    def __str__(self) -> str:
        """Name every holder, its purpose and its age."""
        held = "; and ".join(str(holder) for holder in self.holders)
        state = f"the lock is held {held}" if held else "nobody holds the lock any more"
        return f"waited {self.waited_s:.1f} s to {self.wanted}; {state}"


@dataclass(eq=False, repr=False, kw_only=True)
class LockOrderError(ManagerError):
    """The requested section would have to wait for the calling thread itself.

    Attributes:
        wanted: The requested section, e.g. ``"write ('optimizer step')"``.
        holders: The open sections of the calling thread.
    """

    wanted: str
    holders: tuple[LockHolder, ...]

    def __str__(self) -> str:
        """Name the sections that the thread must release first."""
        held = "; and ".join(str(holder) for holder in self.holders)
        return f"cannot {self.wanted} before this thread releases what it holds: the lock is held {held}"


@dataclass(eq=False, repr=False, kw_only=True)
class LockNotHeldError(ManagerError):
    """A section was released that is not open.

    Attributes:
        kind: Whether the section was for reading or for writing.
        what: Its purpose.
    """

    kind: Kind
    what: str

    def __str__(self) -> str:
        """Name the section."""
        return f"expected an open {self.kind} section {self.what!r} to release, but it has been released already"


class RegistryError(ManagerError):
    """The registry of state functions was used, or answered, wrongly.

    Attributes:
        reason: The whole sentence, which names the keys.
        keys: The keys concerned.
    """

    def __init__(self, reason: str, *, keys: tuple[str, ...] = ()) -> None:
        """Keep the fields; see the class."""
        super().__init__(reason)
        self.reason = reason
        self.keys = keys


class StateMismatchError(RegistryError):
    """The registered objects cannot load a peer's state, so another attempt is useless. Nothing was received."""


class LoaderOrderError(ManagerError):
    """The loop draws batches in a way that the loader's state does not show.

    Attributes:
        key: The registered loader's key.
    """

    def __init__(self, message: str, *, key: str) -> None:
        """Keep the fields; see the class."""
        super().__init__(message)
        self.key = key


@dataclass(eq=False, repr=False, kw_only=True)
class StateTornError(ManagerError):
    """The replica has a partial state and must not step: training would spread the damage.

    Attributes:
        step: The step whose state was being received.
        reason: Why that failed.
    """

    step: int | str
    reason: str

    def __str__(self) -> str:
        """Name the step, the reason and the remedy."""
        return (
            f"this replica holds only part of the state of step {self.step} and must not step until Manager.recover or "
            f"Manager.load has brought it a whole one: {self.reason}"
        )


class QuorumError(ManagerError):
    """The replicas could not form a quorum; the message names the present and the missing ones."""


class QuorumTimeoutError(QuorumError, TimeoutError):
    """A replica or rank did not arrive in time; torchft's Manager raises ``TimeoutError`` then."""


@contextmanager
def quorum_errors() -> Iterator[None]:
    """Raise errors of agreement through a store as the manager's errors."""
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
    """Replicas have different states of one step, and no majority agrees.

    Attributes:
        step: The committed step.
        replicas: The compared replicas.
        tensors: Paths of the differing tensors, if the replicas could exchange them.
        store_address: Address of the store for that exchange.
    """

    step: int
    replicas: tuple[str, ...]
    store_address: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Name the tensors."""
        shown = ", ".join(self.tensors[:_MAX_SHOWN]) or "some tensors"
        more = f" and {len(self.tensors) - _MAX_SHOWN} more" if len(self.tensors) > _MAX_SHOWN else ""
        return (
            f"expected the same state of step {self.step} on {list(self.replicas)}, and no majority of them agrees: "
            f"{shown}{more} differ; load a durable checkpoint from before"
        )


@dataclass(eq=False, repr=False, kw_only=True)
class ReductionMismatchError(QuorumError):
    """Replicas began to reduce different tensors in one step, or in another order.

    Attributes:
        position: Number of equal reductions before the mismatch.
        reductions: The next reduction of each replica, by id.
    """

    position: int
    reductions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Name both sides."""
        sides = "; ".join(f"{what} on {', '.join(replicas)}" for what, replicas in self._sides().items())
        return (
            f"expected all replicas to reduce the same tensors in the same order, and after {self.position} equal ones "
            f"they began different reductions: {sides}; reduce the same gradients on all replicas whatever their "
            "batches, or call manager.average_gradients(model)"
        )

    def differs_from_most(self, replica_id: str) -> bool:
        """Return whether at most half of the replicas made the same reduction as this one."""
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
    """Optimizers have different hyperparameters after one step, and no majority agrees, or a heal did not help.

    Attributes:
        tensors: Each hyperparameter that differs, with its value on each replica.
    """

    def __str__(self) -> str:
        """Name the values, and the usual causes."""
        shown = "; ".join(self.tensors[:_MAX_SHOWN]) or "which ones is not known"
        more = f"; and {len(self.tensors) - _MAX_SHOWN} more" if len(self.tensors) > _MAX_SHOWN else ""
        return (
            f"expected the same hyperparameters of optimizers after step {self.step} on {list(self.replicas)}, got "
            f"others: {shown}{more}; give all replicas the same settings, register every learning rate scheduler "
            "(manager.register('scheduler', scheduler)), and step it after each commit on all of them"
        )


class RecoveryFailedError(ManagerError):
    """Neither a live peer nor a durable checkpoint could provide a state."""


@dataclass(eq=False, repr=False, kw_only=True)
class HealFailedError(ManagerError):
    """The replica could not heal, and makes no further attempt.

    Attributes:
        step: The step of the last attempt.
        reasons: The reason of each attempt, with its source.
    """

    step: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """List the reasons."""
        times = "once" if len(self.reasons) == 1 else f"{len(self.reasons)} times"
        return f"healing for step {self.step} failed {times}: " + "; ".join(self.reasons)


class ManagerClosedError(ManagerError):
    """The manager was shut down, or belongs to the process that forked this one."""


class ReportedError(ManagerError):
    """The error that failed a step, as ``Manager.errored`` returns it; torchft's ``ExceptionWithTraceback``.

    Attributes:
        original_exception: The reported exception.
        stack_trace: Its formatted traceback.
    """

    def __init__(self, error: Exception) -> None:
        """Keep the error; see the class."""
        super().__init__(error)
        self.original_exception = error
        self.stack_trace = "".join(traceback.format_exception(error))

    def __str__(self) -> str:
        """Return type and message."""
        return f"{type(self.original_exception).__name__}: {self.original_exception}"


@dataclass(eq=False, repr=False, kw_only=True)
class CommitFailedError(ManagerError, RuntimeError):
    """Too many steps in a row were not committed.

    Attributes:
        step: The last committed step.
        num_failures: Number of failed attempts at the next one.
        reasons: The reasons of the last failure.
    """

    step: int
    num_failures: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the number of failures and the last reasons."""
        why = "; ".join(self.reasons) or "another rank of this replica refused"
        return f"the step after {self.step} was not committed {self.num_failures} times in a row; the last time: {why}"


class ReplicaFaultError(CommitFailedError):
    """This replica's own errors failed several steps; it leaves so that the others can continue.

    Attributes:
        step: The last committed step.
        num_failures: Number of attempts since then that its own errors failed.
        reasons: The last errors.
    """

    def __str__(self) -> str:
        """Return the number of failures and the errors."""
        return (
            f"errors of this replica's own failed the step after {self.step} {self.num_failures} times; it leaves, so "
            f"that the others can go on; end this process, and start it again when this is mended: "
            f"{'; '.join(self.reasons)}"
        )
