"""The command ``ft-transport``, and ``python -m ft_transport.cli``; Ctrl-C ends it in one line also during imports."""

from __future__ import annotations

import sys

_INTERRUPTED = 130
"""As shells count: 128 and the number of SIGINT."""


def main() -> None:
    """Run the command line."""
    try:
        from ft_transport.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
