"""The version of all weights in vLLM's and SGLang's answers: ``weight_version``, a string."""

from __future__ import annotations

from typing import Final

from ft_transport.publish.engines.engine import Answer

_MAX_DIGITS: Final = 18


def weight_version(answer: Answer) -> int | None:
    """Return the version in an answer, ``None`` if it is not a published one, as before the first.

    Raises:
        EngineRefusedError: The answer is not JSON.
    """
    fields = answer.json()
    version = fields.get("weight_version") if isinstance(fields, dict) else None
    if not isinstance(version, str) or not version.isdecimal() or len(version) > _MAX_DIGITS:
        return None
    return int(version)


def confirmed_weight_version(answer: Answer, expected: int) -> int:
    """Return the version in an answer.

    Raises:
        EngineRefusedError: The answer has no published version.
    """
    version = weight_version(answer)
    if version is None:
        raise answer.refusal(f"expected weight_version {expected}")
    return version
