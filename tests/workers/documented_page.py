"""Runs the blocks of one page in order, as a reader would who types them in: ``documented_page.py PAGE``.

Python blocks share one namespace; bash blocks run with ``bash -euo pipefail`` in the same directory and environment. A
comment in the page that begins with ``<!-- run first`` is Python that runs before the block below it: it makes what the
page takes for granted (a model, a peer), and may put into ``replaced`` what stands for something that a reader has and
a test has not (``replaced["http://host-a:8000"] = url``). A block below ``<!-- not run: reason -->`` is left out, and
one below ``<!-- a test of its own: file::name -->`` as well. What a page leaves open is closed at its end:
``closing(function)``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PART = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$|^<!-- (?P<comment>.*?)-->$", re.MULTILINE | re.DOTALL
)
_SETUP = "run first"
_NOT_RUN = "not run: "
_OWN_TEST = "a test of its own: "


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: What follows the fence.
        line: Where its code begins; the first line is 1.
        code: Without fences.
        setups: Python that runs before it, each with the line where it begins.
        not_run: Why it isn't run; empty if it is.
        own_test: The test that runs it; empty if the page's does.
    """

    language: str
    line: int
    code: str
    setups: tuple[tuple[int, str], ...]
    not_run: str
    own_test: str


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page, in order; a comment belongs to the block that begins below it."""
    setups: list[tuple[int, str]] = []
    not_run = own_test = ""
    commented_until = -1
    for part in _PART.finditer(text):
        comment = part["comment"]
        if comment is not None:
            line = text.count("\n", 0, part.start()) + 2
            if comment.startswith(_SETUP):
                setups.append((line, comment.partition("\n")[2]))
            elif comment.startswith(_NOT_RUN):
                not_run, commented_until = " ".join(comment[len(_NOT_RUN) :].split()), part.end()
            elif comment.startswith(_OWN_TEST):
                own_test, commented_until = comment[len(_OWN_TEST) :].strip(), part.end()
            continue
        if text[commented_until : part.start()].strip():
            not_run = own_test = ""  # the comment was above something else
        line = text.count("\n", 0, part.start("code")) + 1
        indent = part["indent"]
        code = "\n".join(each.removeprefix(indent) for each in part["code"].splitlines()) + "\n"
        yield Block(part["language"], line, code, tuple(setups), not_run, own_test)
        setups, not_run, own_test, commented_until = [], "", "", -1


class _Page:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._replaced: dict[str, str] = {}
        self._namespace: dict[str, Any] = {
            "__name__": "__main__",
            "replaced": self._replaced,
            "closing": stack.callback,
            "entered": stack.enter_context,
        }

    def run(self, block: Block) -> None:
        for line, setup in block.setups:
            self._execute(setup, line)
        if block.not_run or block.own_test:
            return
        code = block.code
        for written, meant in self._replaced.items():
            code = code.replace(written, meant)
        run: dict[str, Callable[[str, int], None]] = {"python": self._execute, "bash": self._execute_in_bash}
        if block.language in run:
            print(f"{self._path.name}:{block.line}", flush=True)
            run[block.language](code, block.line)

    def _execute(self, code: str, line: int) -> None:
        padded = "\n" * (line - 1) + code  # so that a traceback names the line of the page
        exec(compile(padded, str(self._path), "exec"), self._namespace)

    def _execute_in_bash(self, code: str, _line: int) -> None:
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True, stdin=subprocess.DEVNULL)


def main() -> None:
    """Run a page in the present directory."""
    path = Path(sys.argv[1])
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with ExitStack() as stack:
        page = _Page(path, stack)
        for block in blocks_of(path.read_text()):
            page.run(block)
    print("all blocks ran", flush=True)


if __name__ == "__main__":
    main()
