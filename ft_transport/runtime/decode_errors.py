"""The errors of msgspec's decoders for untrusted bytes."""

from __future__ import annotations

from typing import Final

import msgspec

DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""``UnicodeError``: text that is not UTF-8. ``RecursionError``: about a thousand nested brackets, even under an ignored
key; a caller that catches only ``MsgspecError`` would crash on 2 KB from a peer."""
