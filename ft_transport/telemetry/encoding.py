"""JSON of values with any text: names of peers, paths, and messages of errors that quote them.

Bytes of a header or a path that are no UTF-8 become lone surrogates (PEP 383), which JSON cannot represent.
"""

from __future__ import annotations

from typing import Any

import msgspec


def encode_told(told: object) -> bytes:
    """Encode JSON in one line; a character that cannot be encoded becomes a question mark."""
    try:
        return msgspec.json.encode(told)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(told)))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
        case _:
            return value
