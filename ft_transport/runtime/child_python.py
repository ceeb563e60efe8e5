"""Starts Python programs of this package as children that import the same modules as this process.

With ``-m`` and ``-c`` Python searches the working directory first (https://docs.python.org/3/library/sys.html,
``sys.path``). There a child of a training run would import the user's ``queue.py`` instead of the standard library's,
and in a checkpoint directory it would run any code placed beside the checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

_PROGRAM: Final = """
import sys
sys.path[:] = [place for place in sys.path if place]
from {module} import {function} as run
run()
"""


def child_command(module: str, function: str, *arguments: str) -> tuple[str, ...]:
    """Return a command that calls a function of a module in its own process.

    Args:
        module: A module of this distribution.
        function: Its name; it takes no arguments and reads ``sys.argv[1:]``.
        arguments: Arguments of the command.
    """
    return (sys.executable, "-c", _PROGRAM.format(module=module, function=function), *arguments)


def child_environment() -> dict[str, str]:
    """Return this process's environment, completed so that a child finds this package."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths}
