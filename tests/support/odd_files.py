"""What may stand in the place of a file."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    # A socket's path is short, and that of a test's directory may not be.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


def put_directory(path: Path) -> None:
    path.mkdir()
