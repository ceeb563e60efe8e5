"""How much memory is left is the least that the machine or any control group says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_transport.state.host_memory import available_bytes

MEMINFO = "MemTotal:       24000 kB\nMemFree:          100 kB\nMemAvailable:   20000 kB\n"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        pytest.param("", {}, 20_480_000, id="no groups"),
        pytest.param("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 20_480_000, id="no limit"),
        pytest.param("0::/\n", {"memory.max": "9000\n", "memory.current": "5000\n"}, 4000, id="a container's own"),
        pytest.param(
            "0::/\n",
            {
                "memory.max": "9000\n",
                "memory.current": "5000\n",
                "memory.stat": "anon 7\ninactive_file 1500\nactive_file 200\n",
            },
            5700,
            id="files that can be dropped",
        ),
        pytest.param(
            "0::/jobs/one\n",
            {
                "jobs/memory.max": "7000\n",
                "jobs/memory.current": "6500\n",
                "jobs/one/memory.max": "9000\n",
                "jobs/one/memory.current": "1000\n",
            },
            500,
            id="a group around it",
        ),
        pytest.param(
            "3:cpu:/x\n5:memory,other:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "9000\n",
                "memory/job/memory.usage_in_bytes": "2000\n",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50\n",
            },
            7350,
            id="version 1",
        ),
        pytest.param("0::/\n", {"memory.max": "9\n", "memory.current": "50\n"}, 0, id="more taken than allowed"),
        pytest.param("rubbish\n\n0::/../..\n", {"memory.max": "x\n"}, 20_480_000, id="nothing to be understood"),
    ],
)
def test_the_least_of_all_counts(tmp_path: Path, cgroup: str, groups: dict[str, str], expected: int) -> None:
    proc = _write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": cgroup})
    assert available_bytes(proc, _write(tmp_path / "cgroups", groups)) == expected


def test_where_nobody_tells_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


def test_this_machine_has_some() -> None:
    available = available_bytes()
    assert available is not None
    assert available > 0
