"""Structured log records of quorums, commits and errors, under torchft's logger names and with its fields.

What collects torchft's (``torchft/otel.py``) collects these. Each record has the fields ``job_id`` (from ``JOB_ID``),
``replica_id``, ``rank``, ``quorum_id`` and ``step`` or ``error``.
"""

from __future__ import annotations

import logging
import os
from typing import Final

QUORUMS: Final = logging.getLogger("torchft_quorums")
COMMITS: Final = logging.getLogger("torchft_commits")
ERRORS: Final = logging.getLogger("torchft_errors")


def record(
    log: logging.Logger, what: str, *, replica_id: str, rank: int, quorum_id: int, **fields: int | bool | str
) -> None:
    """Log one event.

    Args:
        log: One of the three.
        what: The event in words.
        replica_id: As in `Manager.replica_id`.
        rank: Within the replica.
        quorum_id: What process groups are told as theirs.
        **fields: What else torchft says in records of this kind.
    """
    if log.isEnabledFor(logging.INFO):
        common = {
            "job_id": os.environ.get("JOB_ID", "unknown"),
            "replica_id": replica_id,
            "rank": rank,
            "quorum_id": quorum_id,
        }
        log.info("%s", what, extra={**common, **fields})
