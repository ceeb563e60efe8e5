"""``GET /v1/models``, by which vLLM, SGLang and SkyRL's server say which adapters they serve, and from where.

An adapter's card has its name as ``id``, the directory that it was loaded from as ``root`` and the base model as
``parent`` (vllm/entrypoints/openai/models/serving.py; sglang/srt/entrypoints/http_server.py, ``available_models``).
"""

from __future__ import annotations

from pathlib import Path

from ft_transport.errors import EngineRefusedError
from ft_transport.publish.engines.engine import Delivery, EngineConnection
from ft_transport.publish.naming import version_in


async def adapters_served(connection: EngineConnection) -> dict[str, str]:
    """The adapters that an engine serves, and the directory that each was loaded from.

    Raises:
        EngineRefusedError: The answer is no list of models.
        EngineUnreachableError: There was none.
    """
    answer = await connection.get("/v1/models")
    models = answer.json()
    try:
        served = {card["id"]: str(card["root"]) for card in models["data"] if card.get("parent") is not None}
    except (KeyError, TypeError, AttributeError):
        raise answer.refusal("expected a list of models") from None
    connection.serving = frozenset(version for root in served.values() if (version := version_in(root)) is not None)
    return served


async def adapter_confirmed(connection: EngineConnection, name: str, delivery: Delivery) -> int:
    """The version that an engine serves under a name.

    Raises:
        EngineRefusedError: It serves none, or one that was not published.
        EngineUnreachableError: It did not answer.
    """
    served = await adapters_served(connection)
    root = served.get(name, "")
    version = version_in(root)
    if version is None or Path(root).parent != delivery.directory.parent:
        raise EngineRefusedError(
            f"expected the adapter {name!r}, loaded from {delivery.directory}, among those that the engine serves; it "
            f"serves {served or 'none'}",
            peer=connection.url,
        )
    return version
