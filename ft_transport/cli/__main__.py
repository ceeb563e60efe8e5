"""The entry point of ``ft-transport`` and of ``python -m ft_transport.cli``.

After Ctrl-C, the command prints one line instead of a traceback, even while its modules are being imported.
"""

from __future__ import annotations

import sys

_INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""


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
