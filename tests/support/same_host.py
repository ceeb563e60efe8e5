"""Sources and receivers that pass memory on one host, and what shows which way the bytes took."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

_TAKEN = re.compile(r"step \d+: copied (\d+) of (\d+) chunks from the memory")


def taken_from_memory(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int]]:
    """Of each fetch that was lent memory so far: how many chunks came from that, of how many."""
    found = (_TAKEN.match(record.getMessage()) for record in caplog.records)
    return [(int(match[1]), int(match[2])) for match in found if match is not None]


def listen_to(caplog: pytest.LogCaptureFixture) -> None:
    """Has `taken_from_memory` know of what comes."""
    caplog.set_level(logging.INFO, "ft_transport.http.client.same_host")


def open_snapshots(process: int | str = "self") -> list[str]:
    """The memory files of snapshots that a process has open: its own, and what is lent to it."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the one that listed the folder
            continue
        if "memfd:ft-transport-snapshot" in target:
            found.append(target)
    return found
