from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import Program

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.errors import CheckpointInUseError


def test_one_process_at_a_time_may_save(tmp_path: Path) -> None:
    first, second = RootClaim(tmp_path / "root"), RootClaim(tmp_path / "root")
    first.take("ranks [0, 1]", 0)
    with pytest.raises(CheckpointInUseError, match=r"ranks \[0, 1\]"):
        second.take("others", 0.1)
    owner = json.loads((tmp_path / "root" / ".owner").read_text())
    assert (owner["owner"], owner["process"]) == ("ranks [0, 1]", os.getpid())
    first.release()
    first.release()
    second.take("others", 0)
    second.release()


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from ft_transport.checkpoint.claim import RootClaim\n"
        "RootClaim(Path(sys.argv[1])).take('another', 0); print('claimed', flush=True); sys.stdin.read()"
    )
    claim = RootClaim(tmp_path)
    with Program(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "claimed\n"
            with pytest.raises(CheckpointInUseError, match=f"another.*{process.pid}"):
                claim.take("this one", 0)
        finally:
            process.kill()
        process.wait(30)
    claim.take("this one", 0)
    claim.release()
