"""The demo's replicas as processes: starts them, kills them, and reads their reports."""

from __future__ import annotations

import json
import queue
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

from ft_transport.runtime.children import child_command, child_environment
from ft_transport.runtime.signal_safe import SafeThread

ENDED: Final = "ended"


class Event(NamedTuple):
    """One line from one start of a replica, and when it came."""

    replica: str
    process_id: int
    name: str
    fields: dict[str, Any]
    received_s: float


@dataclass(slots=True)
class ReplicaProcess:
    """One start of a replica, and the thread that reads its reports.

    Attributes:
        name: Name of the replica; the same for all its starts.
        group_rank: Its rank within the replica.
        process: The running process.
        digests: By step, the digest of its state at the step's boundary.
        step_seconds: By step, its duration.
        metrics: URL of its metrics; empty until it has reported it.
        committed_s: When it reported each committed step, by the monotonic clock.
        num_recoveries: Number of states that it has received and loaded.
        received_bytes: Bytes received in heals that have ended.
        is_still: Whether it has stopped training, and waits for its end.
    """

    name: str
    group_rank: int
    process: subprocess.Popen[str]
    digests: dict[int, str] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)
    metrics: str = ""
    committed_s: list[float] = field(default_factory=list)
    num_recoveries: int = 0
    received_bytes: int = 0
    is_still: bool = False

    @classmethod
    def start(
        cls,
        name: str,
        events: queue.SimpleQueue[Event],
        arguments: list[str],
        *,
        lighthouse: str,
        rank: int = 0,
        num_ranks: int = 1,
        store_port: int = 0,
    ) -> ReplicaProcess:
        """Start the process; its events arrive in the queue.

        Args:
            name: Name of the replica.
            events: The queue of its events.
            arguments: Size of the model.
            lighthouse: Address of the Lighthouse.
            rank: Rank in the replica.
            num_ranks: Number of the replica's ranks.
            store_port: Port of the store at which several ranks meet.
        """
        # As torchrun sets them (torch/distributed/run.py). The store is the launcher's, not rank 0's.
        torchrun = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        process = subprocess.Popen(
            child_command("manager.demo.replica", "main", name, *arguments),
            env={
                **child_environment(),
                **(torchrun if num_ranks > 1 else {}),
                "TORCHFT_LIGHTHOUSE": lighthouse,
                "RUST_LOG": "error",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "it was asked for a pipe"
        SafeThread(target=_read_events, args=(name, process.pid, process.stdout, events), daemon=True).start()
        return cls(name, rank, process)

    def note(self, event: Event) -> None:
        """Process one report."""
        fields = event.fields
        match event.name:
            case "serving":
                self.metrics = fields["metrics"]
            case "boundary":
                self.digests[fields["step"]] = fields["digest"]
            case "step":
                self.step_seconds[fields["step"]] = fields["seconds"]
                if fields["committed"]:
                    self.committed_s.append(event.received_s)
            case "healed":
                self.num_recoveries += 1
            case "recorded":
                self.received_bytes += fields["received_bytes"]
            case "still":
                self.is_still = True
            case _:
                pass

    def stand_still(self, step: int) -> None:
        """Request training up to this step, and no further."""
        assert self.process.stdin is not None, "it was asked for a pipe"
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill it with SIGKILL, as a power failure would."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Request its exit after the present step; `kill` ends it in any case."""
        assert self.process.stdin is not None, "it was asked for a pipe"
        with suppress(OSError):  # it has exited
            self.process.stdin.close()


def _read_events(name: str, process_id: int, lines: IO[str], events: queue.SimpleQueue[Event]) -> None:
    with lines:
        for line in lines:
            with suppress(json.JSONDecodeError):  # cut off when it was killed
                fields = json.loads(line)
                events.put(Event(name, process_id, fields.pop("event"), fields, time.monotonic()))
    events.put(Event(name, process_id, ENDED, {}, time.monotonic()))
