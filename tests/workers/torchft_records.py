"""Three steps of two replicas, and which fields the structured log records of each logger have.

Run as a program, it prints those of torchft's own Manager, which leaves sockets and threads behind.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from quorum_threads import lighthouse, run_replicas

LOGGERS = ("torchft_quorums", "torchft_commits", "torchft_errors")


def train(manager: Any) -> Any:
    """Two steps are committed, and one is not."""
    manager.register_state_dict_fn("part", lambda part: None, lambda: {"weight": torch.ones(1)})
    for _ in range(2):
        manager.start_quorum()
        manager.allreduce(torch.ones(2)).wait()
        assert manager.should_commit()
    manager.start_quorum()
    manager.wait_quorum()
    manager.report_error(ConnectionError("lost"))
    assert not manager.should_commit()
    return manager


def fields(records: list[logging.LogRecord]) -> dict[str, list[str]]:
    """Which fields the records of each logger have besides those that every record has."""
    common = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
    found: dict[str, list[str]] = {}
    for record in records:
        if record.name in LOGGERS:
            own = sorted(set(vars(record)) - common)
            assert found.setdefault(record.name, own) == own
    return found


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def main() -> None:
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    keeper = _Keeper()
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(keeper)

    def replica(address: str, index: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            ProcessGroupGloo(),
            None,
            None,
            2,
            timeout=timedelta(seconds=10),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=address,
            replica_id=f"replica_{index}",
            init_sync=False,
        )
        train(manager)._pg.abort()
        manager.shutdown()

    with lighthouse(min_replicas=2) as address:
        run_replicas(*(lambda index=index: replica(address, index) for index in range(2)))
    print(json.dumps(fields(keeper.records)))
    sys.stdout.flush()
    # Its threads may not end.
    os._exit(0)


if __name__ == "__main__":
    main()
