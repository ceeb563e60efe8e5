"""The demo's replicas as processes: started, killed, and listened to."""

from __future__ import annotations

import json
import queue
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

from ft_transport.runtime.child_python import child_command, child_environment
from ft_transport.runtime.handler_safety import SafeThread

ENDED: Final = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line from one start of a replica, and when it came."""

    replica: str
    process_id: int
    name: str
    fields: dict[str, Any]
    received_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun would tell a rank of a replica: who it is, and where the replica's store is."""

    group_rank: int
    num_ranks: int
    store_port: int

    def environment(self) -> dict[str, str]:
        """The variables of torchrun (``torch/distributed/run.py``)."""
        return {
            "RANK": str(self.group_rank),
            "LOCAL_RANK": str(self.group_rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store_port),
            # The store is the launcher's, not rank 0's.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@dataclass(slots=True)
class ReplicaProcess:
    """One start of a replica, and the thread that reads its reports.

    Attributes:
        name: Of the replica; the same however often it is started.
        group_rank: Which of its ranks this is.
        process: The running process.
        digests: By step, the digest of the state that it held at the step's boundary.
        step_seconds: By step, how long it took.
        metrics: Where its metrics are; empty until it has said so.
        committed_s: When it reported each step that it has committed, by the monotonic clock.
        num_recoveries: States that it has received and loaded.
        received_bytes: In heals that have ended.
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
        launch: Launch | None = None,
    ) -> ReplicaProcess:
        """Starts the process; its events arrive in the queue.

        Args:
            name: Of the replica.
            events: Where they arrive.
            arguments: Size of the model.
            lighthouse: Its address.
            launch: Which rank of the replica it is, if that has several.
        """
        variables = launch.environment() if launch is not None else {}
        process = subprocess.Popen(
            child_command("manager.demo.replica", "main", name, *arguments),
            env={**child_environment(), **variables, "TORCHFT_LIGHTHOUSE": lighthouse, "RUST_LOG": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "it was asked for a pipe"
        SafeThread(target=_read_events, args=(name, process.pid, process.stdout, events), daemon=True).start()
        return cls(name, launch.group_rank if launch is not None else 0, process)

    def note(self, event: Event) -> None:
        """Takes in what it has reported."""
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
        """Has it train up to this step, and wait there for its end."""
        assert self.process.stdin is not None, "it was asked for a pipe"
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Ends it as a power failure does: with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Asks it to end after its present step; `kill` ends it in any case."""
        assert self.process.stdin is not None, "it was asked for a pipe"
        with suppress(OSError):  # it has exited
            self.process.stdin.close()


def _read_events(name: str, process_id: int, lines: IO[str], events: queue.SimpleQueue[Event]) -> None:
    def put(event: str, fields: dict[str, Any]) -> None:
        events.put(Event(replica=name, process_id=process_id, name=event, fields=fields, received_s=time.monotonic()))

    with lines:
        for line in lines:
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off when it was killed
            put(fields.pop("event"), fields)
    put(ENDED, {})
