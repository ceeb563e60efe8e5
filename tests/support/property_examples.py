"""How many examples hypothesis tries: all with ``HYPOTHESIS_PROFILE=full`` (`make test-long`), else a tenth."""

from __future__ import annotations

import os

_IS_FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
_DIVISOR = 10


def num_examples(of_full: int) -> int:
    return of_full if _IS_FULL else of_full // _DIVISOR
