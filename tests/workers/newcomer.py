"""Follows the README as a newcomer does: a fresh clone, and its commands in order. By hand: ``make newcomer``.

It says how many seconds each block took. From the clone to the first replica that has healed should take five minutes
at most, with the downloads. Later blocks run in a virtual environment of their own, as a reader would have one. It
needs git, make and a Python with venv; what it makes lies in a temporary directory, and is removed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from documented_page import blocks_of

_ROOT: Final = Path(__file__).parents[2]
_TARGET_S: Final = 300.0
_DEADLINE_S: Final = 1800.0
_NOT_A_NEWCOMERS: Final = ("PYTHONPATH", "VIRTUAL_ENV", "ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
_HEALED: Final = "killed and healed"


def _run(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done.stdout


def main() -> None:
    """Run every block of the README, and fail if one does, or if the demo came too late."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until-healed", action="store_true", help="leave out what comes after the demo")
    options = parser.parse_args()
    # Nothing of the environment that this runs in may help, no module of the tree that it comes from, and no argument
    # of the make that it was called by.
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_A_NEWCOMERS}
    with tempfile.TemporaryDirectory() as directory:
        clone, own = Path(directory, "clone"), Path(directory, "own")
        begin_s = time.monotonic()
        _run(["git", "clone", "--quiet", f"file://{_ROOT}", str(clone)], _ROOT, environment)
        print(f"clone: {time.monotonic() - begin_s:.0f} s", flush=True)
        healed_s: float | None = None
        for block in blocks_of((clone / "README.md").read_text()):
            if block.not_run or block.language not in ("bash", "python"):
                continue
            if healed_s is not None and not own.exists():
                if options.until_healed:
                    break
                _run([sys.executable, "-m", "venv", str(own)], clone, environment)
                environment["PATH"] = f"{own / 'bin'}{os.pathsep}{environment['PATH']}"
            command = (
                ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [str(own / "bin/python"), "-c"]
            )
            block_begin_s = time.monotonic()
            # Python runs elsewhere, so that it finds what was installed and not the clone's own directories.
            said = _run([*command, block.code], clone if block.language == "bash" else Path(directory), environment)
            first_line = block.code.splitlines()[0]
            print(f"README.md:{block.line}: {time.monotonic() - block_begin_s:.0f} s: {first_line}", flush=True)
            if _HEALED in said and healed_s is None:
                healed_s = time.monotonic() - begin_s
                print(f"from the clone to a healed replica: {healed_s:.0f} s (target: {_TARGET_S:.0f} s)", flush=True)
    if healed_s is None or healed_s > _TARGET_S:
        sys.exit("expected a healed replica within the target")


if __name__ == "__main__":
    main()
