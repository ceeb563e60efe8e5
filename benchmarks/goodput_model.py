"""How much work failures leave in jobs that no machine here can run: a formula, and a simulation that checks it.

Deaths of replicas are independent, with exponentially distributed times between them. A death, and the return of a dead
replica, make the others stand still for a fixed time each. Standstills that overlap count once: all deaths that come
meanwhile are handled together. So all train if none of the events that cause a standstill of ``s`` seconds happened in
the last ``s`` seconds, which has probability ``exp(-rate * s)``.

Restarts of all ranks from a checkpoint follow Daly ("A higher order estimate of the optimum checkpoint interval for
restart dumps", 2006).
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Final

_SAVE_PAUSE_S: Final = 1.0
"""An asynchronous save makes training wait for a copy."""
_DEATH, _RETURN = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, and how often its replicas die.

    Attributes:
        num_replicas: Number of replicas.
        mtbf_s: Mean time between two deaths of one replica, in seconds.
        step_s: Length of a step.
        state_bytes: Size of the state of one rank, which each rank receives from one other rank.
        bytes_per_s: Rate of the network, for each rank.
        restart_s: From a death until the new process is ready to join.
    """

    num_replicas: int
    mtbf_s: float
    step_s: float
    state_bytes: float
    bytes_per_s: float
    restart_s: float

    @property
    def transfer_s(self) -> float:
        """Seconds to transfer a state."""
        return self.state_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a death.

    Attributes:
        death_s: How long the others stand still after a death, repeated work included.
        return_s: How long the others stand still when the replica returns.
        away_s: From a death until the replica contributes again.
    """

    death_s: float
    return_s: float
    away_s: float


def healing(job: Job, notice_s: float, *, overlapped_s: float = 0.0) -> Costs:
    """Return the costs if all replicas wait for one that heals.

    Args:
        job: The job.
        notice_s: From a death until the others train without the dead replica.
        overlapped_s: How much of the transfer the others spend computing: torchft's replicas compute a step meanwhile.
    """
    # On average half of a step is repeated.
    return Costs(
        death_s=notice_s + job.step_s / 2,
        return_s=max(0.0, job.transfer_s - overlapped_s),
        away_s=job.restart_s + job.transfer_s + job.step_s,
    )


def following(job: Job, notice_s: float, *, copy_bytes_per_s: float, optimizer_share: float) -> Costs:
    """Return the costs if a newcomer follows (``manager.quorum.following``).

    Args:
        job: The job.
        notice_s: From a death until the others train without the dead replica.
        copy_bytes_per_s: Rate of the slower of a copy and a digest of the state, each of which one step has to wait for
            if it takes longer than the step.
        optimizer_share: Share of the optimizer in a step: a recorded step takes so much of a step to make again.
    """
    wait_s = max(0.0, job.state_bytes / copy_bytes_per_s - job.step_s)
    replay_s = job.transfer_s * optimizer_share / (1 - optimizer_share)
    return Costs(
        death_s=notice_s + job.step_s / 2,
        return_s=2 * wait_s,
        away_s=job.restart_s + job.transfer_s + replay_s + 3 * job.step_s,
    )


def expected(job: Job, costs: Costs) -> float:
    """Return the committed work over that of an undisturbed job."""
    rate = job.num_replicas / (job.mtbf_s + costs.away_s)
    present = job.mtbf_s / (job.mtbf_s + costs.away_s)
    return present * math.exp(-rate * (costs.death_s + costs.return_s))


def expected_with_restarts(job: Job, notice_s: float) -> float:
    """Return the same for a job whose ranks all restart from the newest checkpoint, saved at the best interval."""
    rate = job.num_replicas / job.mtbf_s
    interval_s = math.sqrt(2 * _SAVE_PAUSE_S / rate)
    lost = math.exp(rate * (notice_s + job.restart_s + job.transfer_s))
    return rate * interval_s / (lost * math.expm1(rate * (interval_s + _SAVE_PAUSE_S)))


def simulated(job: Job, costs: Costs, *, num_deaths: int, seed: int) -> float:
    """Return what `expected` estimates, of one simulated run.

    Args:
        job: The job.
        costs: The costs of a death.
        num_deaths: Length of the run.
        seed: Of the random times of deaths.
    """
    chosen = random.Random(seed)
    events = [(chosen.expovariate(1 / job.mtbf_s), _DEATH) for _ in range(job.num_replicas)]
    heapq.heapify(events)
    num_present, work, now_s, standing_until_s, num_left = job.num_replicas, 0.0, 0.0, 0.0, num_deaths
    while num_left:
        at_s, kind = heapq.heappop(events)
        # One that is away does not work, nor does any while all stand still.
        work += num_present * max(0.0, at_s - max(now_s, standing_until_s))
        now_s = at_s
        if kind == _DEATH:
            num_left -= 1
            num_present -= 1
            standing_until_s = max(standing_until_s, at_s + costs.death_s)
            # It returns with the beginning of a standstill for it.
            heapq.heappush(events, (at_s + costs.away_s, _RETURN))
        else:
            num_present += 1
            standing_until_s = max(standing_until_s, at_s + costs.return_s)
            heapq.heappush(events, (at_s + chosen.expovariate(1 / job.mtbf_s), _DEATH))
    return work / (now_s * job.num_replicas)
