"""What vLLM and SGLang call the version of all weights: ``weight_version``, a string."""

from __future__ import annotations

from typing import Final

from ft_transport.publish.engines.engine import Answer

_MAX_DIGITS: Final = 18


def weight_version(answer: Answer) -> int | None:
    """The version in an answer, ``None`` if it is no published one, as before the first.

    Raises:
        EngineRefusedError: It is no JSON.
    """
    fields = answer.json()
    version = fields.get("weight_version") if isinstance(fields, dict) else None
    if not isinstance(version, str) or not version.isdecimal() or len(version) > _MAX_DIGITS:
        return None
    return int(version)


def confirmed_weight_version(answer: Answer, expected: int) -> int:
    """The version in an answer.

    Raises:
        EngineRefusedError: There is none.
    """
    version = weight_version(answer)
    if version is None:
        raise answer.refusal(f"expected weight_version {expected}")
    return version
