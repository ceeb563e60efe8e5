"""Ways to damage a file."""

from __future__ import annotations

import os
from pathlib import Path


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def truncate(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def append(path: Path, content: bytes = b"\0") -> None:
    with path.open("ab") as file:
        file.write(content)
