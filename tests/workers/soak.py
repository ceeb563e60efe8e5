"""Random faults for as long as wanted, on replicas of 2 ranks each that compare their states; by hand (`make soak`).

Every rank is a process (`soak_rank`), the ranks of a replica share a store, as torchrun's do, and torchft's own
Lighthouse is a process as well. A fault comes every few seconds: a rank, a replica, or two or three at once killed,
stopped for longer than the Lighthouse waits, a signal handler that raises in the training loop, an optimizer that fails
in the middle of a committed step, a step that is skipped or abandoned on one rank, a GIL held for long, a flipped bit.

What must hold: ranks of one number never report different states of one step and lineage, except between a flipped bit
and the comparison that finds it; no call takes longer than its deadline; the job never stands still; processes die only
where they are killed; memory, descriptors and threads of those that live long stay flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any, Final

import soak_rank
from torch.distributed import TCPStore

ALL_NAMES: Final = "abcdefgh"
NUM_RANKS: Final = 2
STANDSTILL_S: Final = 60.0
START_S: Final = 90.0
HEALING_S: Final = 30.0
HEALING_STEPS: Final = soak_rank.COMPARE_EVERY
MAX_FORK_STEPS: Final = 1
GRACE_S: Final = 2.0
LIMITS_S: Final = {
    # A transfer, and the agreement on it, have a timeout of their own.
    "start_quorum": soak_rank.START_QUORUM_S + 3 * soak_rank.TIMEOUT_S,
    "wait_quorum": soak_rank.START_QUORUM_S,
    "allreduce": soak_rank.START_QUORUM_S,
    "wait": soak_rank.TIMEOUT_S,
    "should_commit": soak_rank.SHOULD_COMMIT_S,
    "step": soak_rank.TIMEOUT_S,
}
MAX_GROWTH: Final = 0.10
MAX_MORE: Final = {"num_descriptors": 6, "num_threads": 4}


class ViolationError(Exception):
    """Something that must never happen has."""


@dataclass
class Rank:
    """One process, and what it has reported."""

    replica: str
    group_rank: int
    start: str
    process: subprocess.Popen[str]
    is_killed: bool = False
    boundaries: list[dict[str, Any]] = field(default_factory=list)
    num_since_fault: int = 0
    last_report_s: float = field(default_factory=time.monotonic)
    paused: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.replica}{self.group_rank}"

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
            self.process.stdin.flush()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


@dataclass
class Replica:
    name: str
    store: TCPStore
    num_restarts: int = 0
    ranks: list[Rank] = field(default_factory=list)


class Soak:
    """The job, its faults and what was seen of it. One thread calls it."""

    def __init__(self, directory: Path, seed: int, minutes: float, num_replicas: int) -> None:
        self.random = random.Random(seed)
        self.names = tuple(ALL_NAMES[:num_replicas])
        self._directory = directory
        self._duration_s = minutes * 60
        self._reports: SimpleQueue[tuple[Rank, dict[str, Any]]] = SimpleQueue()
        self._lighthouse, self._address = self._start_lighthouse()
        self.replicas = {name: Replica(name, _new_store()) for name in self.names}
        self.spared = self.random.choice(self.names)
        """Is never killed, so that its memory is seen over the whole run."""
        self.recent: deque[str] = deque(maxlen=60)
        self.begin_s = time.monotonic()
        self.newest_step = -1
        self.last_progress_s = self.begin_s
        self.digests: dict[tuple[int, int, str], dict[str, str]] = defaultdict(dict)
        self.lineages: dict[int, dict[str, None]] = defaultdict(dict)
        self.counts: Counter[str] = Counter()
        self.caught: Counter[str] = Counter()
        self.longest_s: dict[str, tuple[float, str]] = {}
        self.all_ranks: list[Rank] = []
        self.flipped: Rank | None = None
        self.flip_step: int | None = None
        self.is_flip_found = False
        self.resume_at: list[tuple[float, Rank, float]] = []
        self.num_flips_found = 0
        self.downtime_s: list[float] = []
        self.down_since: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------ processes

    def _start_lighthouse(self) -> tuple[subprocess.Popen[bytes], str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            bind = f"127.0.0.1:{probe.getsockname()[1]}"
        with (self._directory / "lighthouse.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("torchft_lighthouse")),
                    *("--bind", bind, "--min_replicas", "1", "--quorum_tick_ms", "20", "--join_timeout_ms", "10000"),
                    *("--heartbeat_timeout_ms", str(int(soak_rank.HEARTBEAT_TIMEOUT_S * 1000))),
                ],
                stdout=log,
                stderr=log,
            )
        return process, f"http://{bind}"

    def start(self, replica: Replica) -> None:
        replica.ranks = []
        self.down_since.setdefault(replica.name, time.monotonic())
        for group_rank in range(NUM_RANKS):
            start = f"{replica.name}{group_rank}-{replica.num_restarts}"
            environment = {
                **os.environ,
                "TORCHFT_LIGHTHOUSE": self._address,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(replica.store.port),
                "RANK": str(group_rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "TORCHELASTIC_RUN_ID": "soak",
                "TORCHELASTIC_RESTART_COUNT": str(replica.num_restarts),
            }
            with (self._directory / f"{start}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, soak_rank.__file__, replica.name],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            rank = Rank(replica.name, group_rank, start, process)
            replica.ranks.append(rank)
            self.all_ranks.append(rank)
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def _read(self, rank: Rank) -> None:
        assert rank.process.stdout is not None
        with rank.process.stdout as lines:
            for line in lines:
                try:
                    report = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut off by a signal
                self._reports.put((rank, report))

    def ranks(self) -> Iterator[Rank]:
        for replica in self.replicas.values():
            yield from replica.ranks

    def watch_processes(self) -> None:
        """As a launcher does: where one rank dies, the others of its replica are ended and all are started again."""
        for replica in self.replicas.values():
            ended = [rank for rank in replica.ranks if rank.process.poll() is not None]
            if not ended:
                continue
            for rank in ended:
                if not rank.is_killed:
                    raise ViolationError(
                        f"{rank.start} ended by itself with {rank.process.returncode}\n{self._log_of(rank)}"
                    )
            self._end(replica.ranks)
            replica.num_restarts += 1
            self.start(replica)

    def _end(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.is_killed = True
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
            assert rank.process.stdin is not None
            with suppress(BrokenPipeError):
                rank.process.stdin.close()

    def _log_of(self, rank: Rank) -> str:
        return (self._directory / f"{rank.start}.log").read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self._end(list(self.ranks()))
        self._lighthouse.kill()
        self._lighthouse.wait()

    # ------------------------------------------------------------------------------------------------ reports

    def take(self, seconds: float) -> None:
        """Take what is reported for as long, and check it."""
        deadline_s = time.monotonic() + seconds
        while True:
            try:
                rank, report = self._reports.get(timeout=max(0.0, min(0.1, deadline_s - time.monotonic())))
            except Empty:
                pass
            else:
                self._note(rank, report)
            self._resume()
            self.watch_processes()
            self._check_progress()
            if time.monotonic() >= deadline_s:
                return

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise ViolationError(f"expected {what} within {timeout_s:g} s")
            self.take(0.05)

    def tell(self, what: str) -> None:
        line = f"{time.monotonic() - self.begin_s:8.2f} step {self.newest_step}: {what}"
        self.recent.append(line)
        with (self._directory / "events.log").open("a") as log:
            log.write(line + "\n")

    def _note(self, rank: Rank, report: dict[str, Any]) -> None:
        rank.last_report_s = time.monotonic()
        match report["event"]:
            case "boundary":
                self._note_boundary(rank, report)
            case "slow":
                self._check_call(rank, report)
            case "caught":
                self.tell(f"{rank.start} caught {report['error']}")
                self.caught[report["error"].split(":")[0]] += 1
            case "done":
                if report["fault"] == "flip":
                    self.flip_step = report["step"]
                if report["fault"] == "hold_gil":
                    rank.paused.append((report["begin_s"], report["end_s"]))
                self.counts[f"{report['fault']} done"] += 1
                self.tell(f"{rank.start} {report['fault']} done {report.get('where', '')}")
            case "differs":
                self.tell(f"{rank.start}: {report['message']}")
                self.is_flip_found = True
                if self.flipped is None:
                    raise ViolationError(f"a comparison found what no flipped bit explains: {report['message']}")
            case other:
                self.tell(f"{rank.start} {other}")

    def _note_boundary(self, rank: Rank, report: dict[str, Any]) -> None:
        step, lineage, digest = report["step"], report["lineage"], report["digest"]
        report["at_s"] = time.monotonic()
        rank.boundaries.append(report)
        if rank.is_killed:
            return
        rank.num_since_fault += 1
        if rank.num_since_fault == 1:
            self.tell(f"{rank.start} in order again at step {step} with {report['num_participants']}")
        if all(each.boundaries for each in self.replicas[rank.replica].ranks) and rank.replica in self.down_since:
            self.downtime_s.append(time.monotonic() - self.down_since.pop(rank.replica))
        if step > self.newest_step:
            self.newest_step, self.last_progress_s = step, time.monotonic()
        for name, seconds in report["longest_s"].items():
            if seconds > self.longest_s.get(name, (0.0, ""))[0]:
                self.longest_s[name] = seconds, rank.start
        self._check_equal(rank, step, lineage, digest)

    def _check_equal(self, rank: Rank, step: int, lineage: str, digest: str) -> None:
        if lineage not in self.lineages[step]:
            self.lineages[step][lineage] = None
            if len(self.lineages[step]) > 1:
                self.counts["steps repeated without a replica"] += 1
                self.tell(f"{rank.start} reports another lineage of step {step}: {list(self.lineages[step])}")
                if all(len(self.lineages[each]) > 1 for each in range(step - MAX_FORK_STEPS, step + 1)):
                    raise ViolationError(f"two histories of {MAX_FORK_STEPS + 1} steps in a row up to step {step}")
        if rank is self.flipped and self.flip_step is not None:
            self._note_flipped(rank, self.flip_step, step, lineage, digest)
            return
        known = self.digests[rank.group_rank, step, lineage]
        known[rank.start] = digest
        if len(set(known.values())) > 1:
            raise ViolationError(
                f"different states of step {step}, lineage {lineage}, on ranks {rank.group_rank}: {known}"
            )

    def _note_flipped(self, rank: Rank, flip_step: int, step: int, lineage: str, digest: str) -> None:
        """The state may differ up to the boundary at which it is compared, and not after it."""
        known = self.digests[rank.group_rank, step, lineage]
        others = [other for start, other in known.items() if start != rank.start]
        if not others:
            return  # this rank was the first one to report
        is_equal = digest in others
        if not is_equal and step > flip_step + HEALING_STEPS:
            raise ViolationError(f"the bit flipped at step {flip_step} of {rank.start} is not healed at {step}")
        if is_equal and (step > flip_step or self.is_flip_found):
            self.num_flips_found += self.is_flip_found
            self.tell(f"{rank.start}: the bit flipped at step {flip_step} is healed at step {step}")
            self.counts["flip healed"] += 1
            self.flipped = None

    def _check_call(self, rank: Rank, report: dict[str, Any]) -> None:
        begin_s, end_s = report["begin_s"], report["end_s"]
        paused_s = sum(
            max(0.0, min(end_s, last_s) - max(begin_s, first_s))
            for each in self.replicas[rank.replica].ranks
            for first_s, last_s in each.paused
        )
        seconds = end_s - begin_s
        self.tell(f"{rank.start} {report['call']} took {seconds:.2f} s ({paused_s:.2f} s of it stopped)")
        if seconds > self.longest_s.get(report["call"], (0.0, ""))[0]:
            self.longest_s[report["call"]] = seconds, rank.start
        if seconds - paused_s > LIMITS_S[report["call"]] + GRACE_S:
            raise ViolationError(f"{rank.start}: {report['call']} took {seconds:.1f} s")

    def _check_progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self.last_progress_s > STANDSTILL_S and now_s - self.begin_s > START_S:
            raise ViolationError(f"no step in {STANDSTILL_S:g} s")
        for rank in self.ranks():
            if now_s - rank.last_report_s > max(STANDSTILL_S, START_S):
                raise ViolationError(f"{rank.start} has reported nothing for {now_s - rank.last_report_s:.0f} s")

    # ------------------------------------------------------------------------------------------------ faults

    def is_in_order(self, name: str) -> bool:
        """Whether both ranks of the replica have begun steps since the last fault anywhere, and the newest one."""
        ranks = self.replicas[name].ranks
        return all(rank.num_since_fault >= 3 and rank.boundaries[-1]["step"] >= self.newest_step - 1 for rank in ranks)

    def begin_fault(self, what: str, *ranks: Rank) -> None:
        """After a fault nobody counts as being in order before it has begun steps again."""
        kind = what.split(maxsplit=1)[0]
        self.counts[kind] += 1
        self.tell(f"FAULT {what} {' '.join(rank.start for rank in ranks)}")
        for rank in self.ranks():
            rank.num_since_fault = 0

    def inject(self) -> None:
        """One fault; the state stays with at least one replica that is not touched by it."""
        in_order = [name for name in self.names if self.is_in_order(name)]
        if not in_order:
            return
        spared = self.random.choice(in_order)
        victims = [name for name in self.names if name != spared and self._is_up(name)]
        if not victims:
            return
        victim = self.random.choice(victims)
        rank = self.random.choice(self.replicas[victim].ranks)
        match self.random.choices(
            ["kill", "kill_replica", "kill_several", "stop", "stop_replica", "handler", "fail_optimizer", "skip_step",
             "abandon", "report_error", "hold_gil", "flip", "interrupt"],
            [4, 2, 1 if len(self.names) < 4 else 6, 4, 2, 4, 5, 3, 3, 2, 3, 3, 16],
        )[0]:  # fmt: skip
            case "kill" | "kill_replica" if victim == self.spared:
                return
            case "kill":
                self._kill(rank)
            case "kill_replica":
                self._kill_replicas(victim)
            case "kill_several":
                mortal = [name for name in victims if name != self.spared]
                if len(mortal) >= 2:
                    self._kill_replicas(*self.random.sample(mortal, self.random.randint(2, min(3, len(mortal)))))
            case "stop":
                self._stop(rank)
            case "stop_replica":
                self._stop(*self.replicas[victim].ranks)
            case "handler":
                self.begin_fault("handler", rank)
                rank.signal(signal.SIGUSR1)
            case "hold_gil":
                self.begin_fault("hold_gil", rank)
                rank.tell("hold_gil", self.random.uniform(1.2, 2.0) * soak_rank.HEARTBEAT_TIMEOUT_S)
            case "flip":
                if len(in_order) == len(self.names):
                    self._flip(rank)
            case name:
                self.begin_fault(name, rank)
                rank.tell(name)

    def _is_up(self, name: str) -> bool:
        return all(
            rank.boundaries and rank.process.poll() is None and not any(each is rank for _, each, _ in self.resume_at)
            for rank in self.replicas[name].ranks
        )

    def _kill(self, rank: Rank) -> None:
        self.begin_fault("kill", rank)
        rank.is_killed = True
        self.down_since[rank.replica] = time.monotonic()
        rank.process.kill()

    def _kill_replicas(self, *names: str) -> None:
        """With the launcher, and so with the store."""
        self.begin_fault("kill_replica" if len(names) == 1 else "kill_several", *self.replicas[names[0]].ranks)
        for name in names:
            replica = self.replicas[name]
            self.down_since[name] = time.monotonic()
            self._end(replica.ranks)
            replica.store = _new_store()

    def _stop(self, *ranks: Rank) -> None:
        self.begin_fault("stop" if len(ranks) == 1 else "stop_replica", *ranks)
        now_s = time.monotonic()
        until_s = now_s + self.random.uniform(1.3, 4.0) * soak_rank.HEARTBEAT_TIMEOUT_S
        for rank in ranks:
            rank.signal(signal.SIGSTOP)
            self.resume_at.append((until_s, rank, now_s))

    def _resume(self, *, all_of_them: bool = False) -> None:
        now_s = time.monotonic()
        for entry in list(self.resume_at):
            until_s, rank, since_s = entry
            if all_of_them or now_s >= until_s:
                self.resume_at.remove(entry)
                rank.paused.append((since_s, time.monotonic()))
                rank.signal(signal.SIGCONT)
                self.tell(f"{rank.start} resumed")

    def _flip(self, rank: Rank) -> None:
        """Nothing else happens until it is healed: with two replicas there is no majority."""
        self.begin_fault("flip", rank)
        self.flipped, self.flip_step, self.is_flip_found = rank, None, False
        rank.tell("flip")
        self.wait_for("the flipped bit to be healed", lambda: self.flipped is None, HEALING_S)

    # ------------------------------------------------------------------------------------------------ the run

    def run(self) -> None:
        for replica in self.replicas.values():
            self.start(replica)
        self.wait_for("all to train", lambda: all(map(self.is_in_order, self.names)), START_S)
        self.begin_s = time.monotonic()
        end_s = self.begin_s + self._duration_s
        told_s = self.begin_s
        while time.monotonic() < end_s:
            self.take(self.random.uniform(0.3, 2.0))
            self.inject()
            if time.monotonic() - told_s > 10:
                told_s = time.monotonic()
                print(f"{told_s - self.begin_s:6.0f} s  step {self.newest_step}  {self._faults()}", flush=True)
        self.wait_for("all to train in the end", lambda: all(map(self.is_in_order, self.names)), START_S)
        self.check_growth()
        self._check_left_behind()

    def _faults(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()) if " " not in name)

    def check_growth(self) -> None:
        """Of each process that lived for long: the end beside what it was after its warm-up."""
        warm_up_s = min(120.0, self._duration_s / 3)
        window_s = warm_up_s / 2
        self.growth: list[str] = []
        wrong = []
        for rank in self.all_ranks:
            reports = rank.boundaries
            if not reports or reports[-1]["at_s"] - reports[0]["at_s"] < warm_up_s + 2 * window_s:
                continue
            first_s, last_s = reports[0]["at_s"] + warm_up_s, reports[-1]["at_s"]
            early = [each for each in reports if first_s <= each["at_s"] < first_s + window_s]
            late = [each for each in reports if each["at_s"] >= last_s - window_s]
            if not early or not late:
                continue
            line = f"{rank.start} lived {last_s - reports[0]['at_s']:.0f} s:"
            for name in ("rss_bytes", "num_descriptors", "num_threads"):
                before, after = (median(each[name] for each in part) for part in (early, late))
                limit = before * (1 + MAX_GROWTH) if name == "rss_bytes" else before + MAX_MORE[name]
                scale = 2**20 if name == "rss_bytes" else 1
                line += f" {name} {before / scale:.0f} → {after / scale:.0f}"
                if after > limit:
                    wrong.append(f"{rank.start}: {name} grew from {before:g} to {after:g}")
            self.growth.append(line)
        if wrong:
            raise ViolationError("; ".join(wrong))

    def _check_left_behind(self) -> None:
        """Processes that a killed rank has started, and that outlive it."""
        ended = {rank.process.pid for rank in self.all_ranks if rank.process.returncode is not None}
        left = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in ended and fields[0] != "Z":
                left.append(entry.parent.name)
        if left:
            raise ViolationError(f"processes {left} outlive the ranks that started them")

    def dump_stacks(self) -> None:
        """faulthandler writes them to the logs."""
        self._resume(all_of_them=True)
        for rank in self.ranks():
            rank.is_killed = True
            rank.signal(signal.SIGABRT)
        time.sleep(1.0)

    def summary(self) -> str:
        minutes = (time.monotonic() - self.begin_s) / 60
        longest = ", ".join(
            f"{name} {seconds:.2f} s ({who})" for name, (seconds, who) in sorted(self.longest_s.items())
        )
        starts = sum(replica.num_restarts for replica in self.replicas.values())
        down_s = self.downtime_s or [0.0]
        return "\n".join(
            [
                f"{minutes:.1f} minutes, {self.newest_step} steps, {len(self.all_ranks)} processes, {starts} restarts",
                f"faults: {self._faults()}",
                f"of these done: {', '.join(f'{key} {n}' for key, n in sorted(self.counts.items()) if ' ' in key)}",
                f"caught by the loops: {', '.join(f'{key} {n}' for key, n in self.caught.most_common())}",
                f"flipped bits found and healed: {self.num_flips_found} of {self.counts['flip']}",
                f"from a start or kill to training: median {median(down_s):.1f} s, longest {max(down_s):.1f} s",
                f"longest calls: {longest}",
                *getattr(self, "growth", ()),
            ]
        )


def _new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--replicas", type=int, default=3, choices=range(2, len(ALL_NAMES) + 1))
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--logs", type=Path, help="where the logs go; default: a temporary directory, kept on failure")
    arguments = parser.parse_args()
    directory = arguments.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {arguments.seed}, logs in {directory}", flush=True)
    soak = Soak(directory, arguments.seed, arguments.minutes, arguments.replicas)
    try:
        soak.run()
    except ViolationError as violation:
        soak.dump_stacks()
        print("\n".join([*soak.recent, "", f"VIOLATION (seed {arguments.seed}): {violation}", "", soak.summary()]))
        return 1
    finally:
        soak.close()
    print(soak.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
