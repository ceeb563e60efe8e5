"""A model and its AdamW states in every layout, received in every layout: equal to one process's, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import layout_matrix as worker
import pytest
import torch
from ranks import run_ranks

_NUM_PROCESSES = 4
_TIMEOUT_S = 240


@pytest.mark.timeout(_TIMEOUT_S + 30)
def test_every_layout_is_received_in_every_other(tmp_path: Path) -> None:
    torch.save(worker.train_reference(), tmp_path / "reference.pt")
    arguments = (str(tmp_path / "reference.pt"), str(tmp_path))
    run_ranks(worker.__file__, _NUM_PROCESSES, *arguments, timeout_s=_TIMEOUT_S)
    reports = [report for file in tmp_path.glob("*.json") for report in json.loads(file.read_text())]

    pairs = {(report["source"], report["receiver"]) for report in reports}
    assert pairs == {(source, receiver) for source in worker.LAYOUTS for receiver in worker.LAYOUTS}
    assert len(reports) == len(worker.LAYOUTS) * sum(layout.size for layout in worker.LAYOUTS.values())
    assert not {
        (report["source"], report["receiver"]): report["differences"] for report in reports if report["differences"]
    }
    # Each rank receives its own parts, each byte once, and nothing besides.
    assert [report for report in reports if report["received_bytes"] != report["local_bytes"]] == []
