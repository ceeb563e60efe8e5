"""What msgspec's decoders raise for bytes that somebody else has made."""

from __future__ import annotations

from typing import Final

import msgspec

DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""The second for text that is no UTF-8. The third for brackets in each other, about a thousand, also where they stand
under a key that nobody asks for: whoever catches the first alone is ended by 2 KB from a peer."""
