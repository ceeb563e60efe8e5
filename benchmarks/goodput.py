"""Goodput: how much of the undisturbed work a job still does if one of its replicas is killed again and again.

Replicas train, one of them gets a SIGKILL, and is started again at once, as a launcher would; with our manager, with
torchft's, and without fault tolerance, where all ranks restart from the newest checkpoint of ``dcp.async_save``. The
Lighthouse declares a silent replica dead after torchft's default of 5 s.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Child
from benchmarks.replicas.dying import START_S, Commit, Job, Start, train, train_with_checkpoints
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.replicas.managers import OURS, TORCHFT, ManagerVariant
from benchmarks.replicas.training import Model
from benchmarks.report import Figure, Group, Named, Quantity, Sample, Verdict
from benchmarks.transports import torchft_is_installed

GOODPUT: Final = Quantity("committed work / that of the undisturbed job", "×")
NEXT: Final = Quantity("from a kill to the others' next commit", "s")
LONGEST: Final = Quantity("the others' longest time between two commits until the killed one is back", "s")
STEP: Final = Quantity("undisturbed step", "s")
RESTART: Final = Named("restart from a checkpoint of DCP", "other")
_STATE_BYTES: Final = 200_000_000
_SMALL_BYTES: Final = 100_000
_ADAPTER_SHARE: Final = 0.01
_START_S: Final = 150.0
_UNDISTURBED_S: Final = 5.0
_KILL_S: Final = 1.0
"""In this time after a kill, the others notice it; a restarted replica joins later."""
_JOINED_S: Final = 10.0
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job, and when replicas are killed.

    Attributes:
        title: Describes the scenario.
        num_replicas: Number of replicas of the job.
        step_s: Length of a step, in seconds.
        state_bytes: Size of a replica's state.
        num_kills: Number of replicas that are killed, one after the other.
        period_s: Time from one kill to the next, and from the last one to the end.
        most_s: Target: the longest time from a kill to the next commit.
        least_goodput: Target: the smallest goodput.
        variants: The managers to compare.
    """

    title: str
    num_replicas: int
    step_s: float
    state_bytes: int
    num_kills: int
    period_s: float
    most_s: float
    least_goodput: float
    variants: tuple[ManagerVariant | Named, ...]

    def job(self, scale: float) -> Job:
        num_items = int(self.state_bytes * scale) // 4 // 4
        num_trained = max(1, int(num_items * _ADAPTER_SHARE))
        frozen = num_items - num_trained
        model = Model(name="goodput", num_tensors=4, num_items=num_trained, num_frozen_items=frozen)
        return Job(model=model, step_s=self.step_s, num_replicas=self.num_replicas)


SCENARIOS: Final = {
    "three": Scenario(
        title="3 replicas of 200 MB, steps of 150 ms, a SIGKILL every 15 s",
        num_replicas=3,
        step_s=0.15,
        state_bytes=_STATE_BYTES,
        num_kills=2,
        period_s=15.0,
        most_s=0.5,
        least_goodput=0.85,
        variants=(OURS, TORCHFT, RESTART),
    ),
    "twelve": Scenario(
        title="12 small replicas, steps of 500 ms, a SIGKILL every 15 s",
        num_replicas=12,
        step_s=0.5,
        state_bytes=_SMALL_BYTES,
        num_kills=1,
        period_s=15.0,
        most_s=0.8,
        least_goodput=0.95,
        variants=(OURS, TORCHFT),
    ),
}


@dataclass(slots=True)
class History:
    """The commits and kills of a run. Times are those of the machine's monotonic clock.

    Attributes:
        commits: The commits of each replica, also of its later starts.
        kills_s: The time of each kill, and the name of the killed replica.
        began_s: The time from which on all replicas trained.
        ended_s: The time at which the run ended.
    """

    commits: dict[str, list[Commit]] = field(default_factory=dict)
    kills_s: list[tuple[float, str]] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0


def run(options: Options) -> Iterator[Group]:
    """Measures one scenario after the other."""
    if not torchft_is_installed():
        group = Group("goodput", "three", "replicas that are killed")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    for name in options.states:
        scenario = SCENARIOS[name]
        group = Group("goodput", name, scenario.title)
        for round_number, variant in options.rounds(f"goodput {name}", scenario.variants):
            history = run_job(variant, scenario, options)
            for quantity, value in quantities(history, is_lossy=variant is RESTART).items():
                group.add(variant, quantity, Sample(round_number, value))
        group.verdicts = [
            Verdict.at_most(f"{NEXT.name}, median", group.figure(OURS, NEXT), scenario.most_s),
            Verdict.at_least(GOODPUT.name, group.figure(OURS, GOODPUT), scenario.least_goodput),
            Verdict.at_least(f"{GOODPUT.name}, above torchft's", _difference(group), 0.0),
        ]
        group.notes.append(f"a killed replica is started again at once, and its imports take {START_S:g} s")
        yield group


def _difference(group: Group) -> Figure | None:
    """Ours less torchft's; a ratio would have no meaning where torchft's has committed nothing."""
    ours, theirs = (group.figure(variant, GOODPUT) for variant in (OURS, TORCHFT))
    if ours is None or theirs is None:
        return None
    return Figure(ours.value - theirs.value, ours.low - theirs.high, ours.high - theirs.low)


def run_job(variant: ManagerVariant | Named, scenario: Scenario, options: Options) -> History:
    """Runs a job, kills replicas, and returns what they reported."""
    with contextlib.ExitStack() as stack:
        job = scenario.job(options.scale)
        if isinstance(variant, ManagerVariant):
            address = stack.enter_context(lighthouse(1))

            def start(name: str, *, is_restart: bool) -> Child:
                return Child(train, variant, job, Start(name=name, address=address, is_restart=is_restart))

        else:
            directory = Path(tempfile.mkdtemp(prefix="goodput-", dir=options.directory))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            # All ranks of a start meet at one address, which those of the start before may still use.
            addresses = itertools.chain.from_iterable(
                itertools.repeat(_free_address(), job.num_replicas) for _ in itertools.count()
            )

            def start(name: str, *, is_restart: bool) -> Child:
                told = Start(name=name, address=next(addresses), is_restart=is_restart)
                return Child(train_with_checkpoints, job, told, directory)

        fleet = Fleet(start, [str(number) for number in range(scenario.num_replicas)])
        stack.callback(fleet.close)
        return fleet.run(scenario, restarts_all=not isinstance(variant, ManagerVariant))


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Fleet:
    """The replicas of one run."""

    def __init__(self, start: Callable[..., Child], names: Sequence[str]) -> None:
        self._start = start
        self._history = History({name: [] for name in names})
        self._children = {name: start(name, is_restart=False) for name in names}

    def run(self, scenario: Scenario, *, restarts_all: bool) -> History:
        history, names = self._history, list(self._children)
        deadline_s = time.monotonic() + _START_S
        while not all(sum(each.contributed for each in commits) > 2 for commits in history.commits.values()):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"expected all replicas to train within {_START_S:.0f} s")
            self._take_until(time.monotonic())
        history.began_s = time.monotonic()
        self._take_until(history.began_s + _UNDISTURBED_S)
        for number in range(scenario.num_kills):
            victim = names[number % len(names)]
            self._take()
            killed_s = time.monotonic()
            history.kills_s.append((killed_s, victim))
            ended = names if restarts_all else [victim]
            for name in ended:
                self._children.pop(name).close()
            self._children |= {name: self._start(name, is_restart=True) for name in ended}
            self._take_until(killed_s + scenario.period_s)
        history.ended_s = time.monotonic()
        return history

    def close(self) -> None:
        for child in self._children.values():
            child.close()

    def _take_until(self, until_s: float) -> None:
        while True:
            self._take()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(_POLL_S, left_s))

    def _take(self) -> None:
        for name, child in self._children.items():
            while child.has_message():
                self._history.commits[name].append(child.receive())


def quantities(history: History, *, is_lossy: bool) -> Mapping[Quantity, float]:
    """Returns the figures of one run.

    Args:
        history: The commits and kills of the run.
        is_lossy: Whether a restart repeats steps: then only steps count that were made for the first time.
    """
    first_kill_s = history.kills_s[0][0]
    undisturbed = [
        (later.at_s - earlier.at_s)
        for commits in history.commits.values()
        for earlier, later in itertools.pairwise(commits)
        if history.began_s <= earlier.at_s and later.at_s <= first_kill_s
    ]
    step_s = statistics.median(undisturbed)
    num_done = 0
    for commits in history.commits.values():
        steps = [each.step for each in commits if first_kill_s < each.at_s <= history.ended_s]
        before = max(each.step for each in commits if each.at_s <= first_kill_s)
        num_done += len({step for step in steps if step > before}) if is_lossy else len(steps)
    possible = len(history.commits) * (history.ended_s - first_kill_s) / step_s
    survivors = [
        (kill_s, commits)
        for kill_s, victim in history.kills_s
        for name, commits in history.commits.items()
        if name != victim
    ]
    # Not the very next one: what was reduced before the death is committed as if nothing had happened.
    following = [_longest_gap(commits, kill_s, kill_s + _KILL_S)[1] - kill_s for kill_s, commits in survivors]
    longest = [_longest_gap(commits, kill_s, kill_s + _JOINED_S) for kill_s, commits in survivors]
    return {
        GOODPUT: num_done / possible,
        NEXT: statistics.median(following),
        LONGEST: max(later - earlier for earlier, later in longest),
        STEP: step_s,
    }


def _longest_gap(commits: Sequence[Commit], from_s: float, to_s: float) -> tuple[float, float]:
    """The longest time between two commits of a replica, of those that begin before ``to_s`` and end after ``from_s``.

    After the last commit, the time until ``to_s`` counts.
    """
    gaps = [
        (earlier, later)
        for earlier, later in itertools.pairwise([*(each.at_s for each in commits), to_s])
        if earlier < to_s and later > from_s
    ]
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=(from_s, to_s))


BENCHMARK: Final = Benchmark(
    name="goodput",
    question="How much work is left if replicas are killed?",
    run=run,
    states=tuple(SCENARIOS),
    default=Size(scale=1.0, num_samples=1),
    misses={
        "from a kill": "Twelve replicas share two cores: a step of 0.5 s takes 0.7 s, and to connect again 0.2 s.",
        "committed work": "The step in which a replica dies is repeated, and a restarted one needs seconds to be back.",
    },
)
