"""A writer process that is killed at one of its steps; its like is started once, and its successors live.

Usage: ``dying_writer.py RECORD FATAL before|after DESCRIPTOR``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dying import Fuse

from ft_transport.checkpoint import writer


def main() -> None:
    record, fatal, when, descriptor = sys.argv[1:]
    if not Path(record).exists():
        fuse = Fuse(Path(record))
        fuse.install()
        fuse.arm(int(fatal), is_after=when == "after")
    sys.argv = ["writer", descriptor]
    writer.main()


if __name__ == "__main__":
    main()
