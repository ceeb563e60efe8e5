"""Starting Python programs of this package as children: they import what this process imports, and from nowhere else.

With ``-m`` and ``-c`` Python looks into the working directory first (https://docs.python.org/3/library/sys.html,
``sys.path``). A child of a training run would take the user's ``queue.py`` for the standard library's there; in a
checkpoint directory it would run what somebody has put beside the checkpoint.
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
    """What to run, to have a function of a module called in a process of its own.

    Args:
        module: Of this distribution.
        function: Takes no arguments; ``sys.argv[1:]`` holds those of the command.
        arguments: Of the command.
    """
    return (sys.executable, "-c", _PROGRAM.format(module=module, function=function), *arguments)


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child finds this package, from wherever this process was started."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths}
