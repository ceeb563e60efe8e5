"""Runs part of the suite with the lowest, the pinned and the newest torch. By hand: ``make test-versions``.

Each row of the matrix is a Python, a torch and a distribution of torchft. A row gets a new environment in a temporary
directory, which is removed before the next row begins: a CUDA build of torch takes 5 GB. Tests run as
``-m "not slow and not long and not gpu and not alone"`` in ``tests/unit`` and ``tests/integration``; engines are not
part of it. The exit status is 1 if a test fails, or if a row cannot be run at all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

_ROOT: Final = Path(__file__).parents[2]
_TESTS: Final = ("tests/unit", "tests/integration")
_QUICK: Final = "not slow and not long and not gpu and not alone"
_DEADLINE_S: Final = 3600
_VERSIONS_PROGRAM: Final = """
from importlib.metadata import version
import platform, sys, torch
print(platform.python_version(), torch.__version__, version(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One environment: a Python such as ``3.10``, a requirement of torch, and an extra that brings torchft."""

    python: str
    torch: str
    torchft: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table."""

    versions: str
    counts: str
    took_s: float
    is_good: bool


def matrix() -> tuple[Row, ...]:
    """The rows: ``pyproject.toml`` says which torch is the lowest, ``constraints.txt`` which one is pinned."""
    lowest = _found(r'"torch>=([\d.]+)"', "pyproject.toml")
    pinned = _found(r"^torch==([\d.]+)$", "constraints.txt")
    return (
        Row("3.10", f"torch=={lowest}.0", "torchft"),
        Row("3.12", f"torch=={pinned}", "torchft-nightly"),
        Row("3.13", "torch", "torchft"),
    )


def _found(pattern: str, name: str) -> str:
    found = re.search(pattern, (_ROOT / name).read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"expected {pattern} in {name}")
    return found[1]


def _interpreter(version: str) -> str:
    """A Python of that version: of the PATH, or of pyenv, whose commands on the PATH may refuse to start."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    on_path = shutil.which(f"python{version}")
    for found in [*([on_path] if on_path else []), *pyenv.glob(f"versions/{version}.*/bin/python{version}")]:
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    raise FileNotFoundError(f"expected a python{version} on the PATH or below {pyenv}, found none")


def _environment(row: Row, directory: Path) -> tuple[Path, str]:
    """Make the environment; return its Python and the versions that it has."""
    python = directory / "venv" / "bin" / "python"

    def call(*command: str | Path) -> str:
        # Elsewhere than in the tree, whose own metadata pip would find there.
        done = subprocess.run(
            command, cwd=directory, check=True, stdout=subprocess.PIPE, text=True, timeout=_DEADLINE_S
        )
        return done.stdout

    call(_interpreter(row.python), "-m", "venv", directory / "venv")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    install = (*pip, "install", "-qq", "--no-compile")
    # torch goes first and alone, and stays: pip must not choose its version while it resolves something else.
    call(*install, row.torch)
    held = directory / "held.txt"
    held.write_text("".join(line + "\n" for line in call(*pip, "freeze").splitlines() if line.startswith("torch==")))
    call(*install, "--constraint", held, "--editable", f"{_ROOT}[dev,bench,{row.torchft}]")
    versions = call(python, "-c", _VERSIONS_PROGRAM, row.torchft).split()
    return python, f"{versions[0]:<8} {versions[1]:<16} {row.torchft} {versions[2]}"


def run(row: Row, tests: list[str], num_processes: int) -> Outcome:
    """Make the row's environment, run the tests there, and remove it."""
    begin_s = time.monotonic()
    versions = f"{row.python:<8} {row.torch:<16} {row.torchft}"
    with tempfile.TemporaryDirectory(prefix="versions-") as directory:
        try:
            python, versions = _environment(row, Path(directory))
        except (OSError, subprocess.SubprocessError) as error:
            return Outcome(versions, f"not run: {error}", time.monotonic() - begin_s, is_good=False)
        print(f"{versions}: installed after {time.monotonic() - begin_s:.0f} s", flush=True)
        report = Path(directory, "report.xml")
        parallel = ["-n", str(num_processes), "--dist", "loadscope", "--no-loadscope-reorder"]
        command = [python, "-m", "pytest", "-q", *parallel, "-m", _QUICK, f"--junitxml={report}", *tests]
        begin_s = time.monotonic()
        try:
            status = subprocess.run(command, cwd=_ROOT, check=False, timeout=_DEADLINE_S).returncode
        except subprocess.TimeoutExpired:
            return Outcome(versions, f"not done within {_DEADLINE_S} s", _DEADLINE_S, is_good=False)
        took_s = time.monotonic() - begin_s
        if not report.exists():
            return Outcome(versions, f"pytest ended with {status}", took_s, is_good=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
        failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        counts = f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped"
        return Outcome(versions, counts, took_s, is_good=status == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=_TESTS, help="files or directories (default: unit, integration)")
    parser.add_argument("--only", choices=[row.python for row in matrix()], help="the row of this Python alone")
    parser.add_argument("--processes", type=int, default=2, help="how many processes run tests (default: 2)")
    options = parser.parse_args()
    rows = [row for row in matrix() if options.only in (None, row.python)]
    outcomes = [run(row, list(options.tests), options.processes) for row in rows]
    print(f"\n{'Python':<8} {'torch':<16} torchft")
    for outcome in outcomes:
        print(f"{outcome.versions}: {outcome.counts}, {outcome.took_s:.0f} s")
    sys.exit(not all(outcome.is_good for outcome in outcomes))


if __name__ == "__main__":
    main()
