"""Refuses docstrings and comments that hide their subject: run by ``make check``."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGES: Final = ("ft_transport", "manager")
OPENER: Final = re.compile(r"(who|what|whoever|whatever|those|of|so many|so much|the ones?)\b(?!-)", re.IGNORECASE)
"""Words that a sentence must not begin with in place of its subject."""
HABIT: Final = re.compile(
    r"\b(whoever|whom|somebody|anybody|(is|are|was|were) told|tells? of|(has|have|is|are) gone|anew|lets? go of)\b",
    re.IGNORECASE,
)
"""Words that stand for a client, a report or an end."""
ENTRY: Final = re.compile(r"^\s+\*{0,2}\w+: (.*)$", re.MULTILINE)
"""An argument, attribute or error of a docstring."""


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, each of its entries, and each comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value
            yield node.lineno, text
            for entry in ENTRY.finditer(text):
                yield node.lineno + text.count("\n", 0, entry.start(1)), entry[1]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def faults_in(source: str) -> dict[int, str]:
    """Return the words that are to be replaced, by line."""
    faults = {}
    for line, text in texts_of(source):
        if opener := OPENER.match(text.strip()):
            faults[line] = f"begins with {opener[0]!r}: name the subject"
        if habit := HABIT.search(text):
            faults[line + text.count("\n", 0, habit.start())] = f"says {habit[0]!r}: name the thing"
    return faults


def main() -> int:
    """Print each fault; return 1 if there are any."""
    found = [
        f"{path}:{line}: {fault}"
        for package in PACKAGES
        for path in sorted(Path(package).rglob("*.py"))
        for line, fault in sorted(faults_in(path.read_text()).items())
    ]
    for fault in found:
        print(fault)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
