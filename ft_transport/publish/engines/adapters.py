"""Loads and unloads adapters. The steps are the same for vLLM, SGLang and SkyRL's server.

These servers list adapters at ``GET /v1/models``. The entry of an adapter has the adapter's name as ``id``, the
directory from which it was loaded as ``root``, and the base model as ``parent``
(vllm/entrypoints/openai/models/serving.py; sglang/srt/entrypoints/http_server.py, ``available_models``).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Final

from safetensors import SafetensorError

from ft_transport.errors import EngineRefusedError
from ft_transport.publish.adapter import MODULE_FEATURES, features_in
from ft_transport.publish.engines.engine import Delivery, Engine, EngineConnection

_DIRECTORY: Final = re.compile(r"version-(0|[1-9][0-9]*)")

_CHANGED_BASE: Final = (
    "it changes the base model's weights, which engines serve unchanged: publish the converted adapter (PEFT's "
    "path_initial_model_for_weight_conversion), or pass init_lora_weights=True in the configuration if the engines "
    "serve the changed weights"
)


def refusal(engine: Engine, features: Mapping[str, object]) -> str | None:
    """Return why an engine cannot apply an adapter; ``None`` if it can.

    Args:
        engine: The engine. Its optional attribute ``adapter_features`` lists the features that the engine applies. Its
            optional attribute ``adapter_gaps`` lists the `MODULE_FEATURES` that the engine does not apply.
        features: The adapter's features beyond plain LoRA, as returned by `features_of`.
    """
    applied: frozenset[str] | None = getattr(engine, "adapter_features", frozenset())
    if applied is None:
        return None
    anywhere = MODULE_FEATURES - getattr(engine, "adapter_gaps", frozenset())
    unapplied = sorted(features.keys() - applied - anywhere)
    if not unapplied:
        return None
    asked = ", ".join(f"{name}={features[name]!r}" for name in unapplied)
    advice = _CHANGED_BASE if "init_lora_weights" in unapplied else "publish merged weights, or train without it"
    return (
        f"expected an adapter that the engine {engine.url} applies; {type(engine).__name__} does not apply {asked} "
        f"and would serve other weights than the trainer has; {advice}"
    )


def check_applied(engine: Engine, delivery: Delivery) -> None:
    """Check that an engine can apply an adapter. `publish` did not check engines that were added later.

    Raises:
        EngineRefusedError: The engine does not apply a feature of the adapter; the message names the feature.
    """
    if delivery.kind == "weights":
        return
    with suppress(OSError, ValueError, SafetensorError):  # The engine itself reports unreadable files.
        if reason := refusal(engine, features_in(delivery.directory)):
            raise EngineRefusedError(reason, body=reason, peer=engine.url)


def version_in(path: str) -> int | None:
    """Return the number of the version whose directory has this path; ``None`` for any other path."""
    match = _DIRECTORY.fullmatch(PurePath(path).name)
    return int(match[1]) if match is not None else None


def adapter_name(template: str, version: int) -> str:
    """Return the name under which an engine serves a version of an adapter."""
    return template.replace("{version}", str(version))


def older_names(template: str, names: Iterable[str], version: int) -> list[str]:
    """Return the names in ``names`` that ``template`` gives to earlier versions than ``version``."""
    before, has_number, after = template.partition("{version}")
    older = []
    for name in names:
        number = name[len(before) : len(name) - len(after)]
        if has_number and number.isdecimal() and name == f"{before}{number}{after}" and int(number) < version:
            older.append(name)
    return older


async def adapters_served(connection: EngineConnection) -> dict[str, str]:
    """Request the list of adapters that an engine serves. Return the directory of each adapter, by name.

    Raises:
        EngineRefusedError: The response is not a list of models.
        EngineUnreachableError: The engine did not answer.
    """
    answer = await connection.get("/v1/models")
    models = answer.json()
    try:
        served = {card["id"]: str(card["root"]) for card in models["data"] if card.get("parent") is not None}
    except (KeyError, TypeError, AttributeError):
        raise answer.refusal("expected a list of models") from None
    connection.serving.clear()
    connection.serving.update(version for root in served.values() if (version := version_in(root)) is not None)
    return served


async def adapter_served(connection: EngineConnection, template: str, newest: Delivery) -> int | None:
    """Return the newest published version that an engine serves as an adapter; ``None`` if it serves none.

    Args:
        connection: Connection to the engine.
        template: Name by which requests select the adapter; ``{version}`` in the name is replaced by the version.
        newest: The newest version. Only adapters in the same parent directory count as published.

    Raises:
        EngineRefusedError: The response is not a list of models.
        EngineUnreachableError: The engine did not answer.
    """
    found: int | None = None
    for name, root in (await adapters_served(connection)).items():
        version = version_in(root)
        if version is None or Path(root).parent != newest.directory.parent or name != adapter_name(template, version):
            continue
        found = version if found is None else max(found, version)
    return found


async def deliver_adapter(
    connection: EngineConnection,
    delivery: Delivery,
    template: str,
    load: Callable[[str, bool], Awaitable[object]],
    unload: Callable[[str], Awaitable[object]] | None = None,
    *,
    unload_after: timedelta = timedelta(0),
) -> int:
    """Load an adapter into an engine, and later unload the older versions. Return the version that the engine confirms.

    Args:
        connection: Connection to the engine.
        delivery: The version to load.
        template: Name by which requests select the adapter; ``{version}`` in the name is replaced by the version.
        load: Loads the adapter. Its arguments are the adapter's name, and whether the engine already serves an adapter
            with this name.
        unload: Unloads the adapter with the given name; called in the background, after this function has returned.
            With ``None``, adapters stay loaded.
        unload_after: How long an adapter stays loaded after the next version was written.

    Raises:
        EngineRefusedError: The engine did not load the adapter.
        EngineUnreachableError: The engine did not answer.
    """
    name = adapter_name(template, delivery.version)
    served = await adapters_served(connection)
    if served.get(name) != str(delivery.directory):
        await load(name, name in served)
    # Asks again, even without a load: a late load of an earlier delivery may have replaced the adapter meanwhile.
    served = await adapters_served(connection)
    root = served.get(name, "")
    version = version_in(root)
    if version is None or Path(root).parent != delivery.directory.parent:
        raise EngineRefusedError(
            f"expected the engine to serve the adapter {name!r} from {delivery.directory}; it serves "
            f"{served or 'no adapters'}",
            peer=connection.url,
        )

    if unload is not None:
        older = {old: served[old] for old in older_names(template, served, version)}
        replaced = _replaced_before(older, delivery, unload_after)
        connection.afterwards(_unload(connection, {old: version_in(older[old]) for old in replaced}, unload))
    return version


def _replaced_before(older: Mapping[str, str], newest: Delivery, age: timedelta) -> list[str]:
    """Return the names of the adapters whose next version was written at least ``age`` before the newest version.

    A version was written at the modification time of its directory.
    """
    newest_s = newest.directory.stat().st_mtime
    oldest_first = sorted(older, key=lambda name: version_in(older[name]) or 0)
    replaced = []
    for name, next_one in pairwise([*oldest_first, None]):
        try:
            replaced_s = Path(older[next_one]).stat().st_mtime if next_one is not None else newest_s
        except OSError:
            replaced_s = float("-inf")  # deleted already
        if name is not None and newest_s - replaced_s >= age.total_seconds():
            replaced.append(name)
    return replaced


async def _unload(
    connection: EngineConnection, older: Mapping[str, int | None], unload: Callable[[str], Awaitable[object]]
) -> None:
    for name, version in older.items():
        with suppress(EngineRefusedError):  # The adapter stays in memory; the next delivery tries to unload it again.
            await unload(name)
            if version is not None:
                connection.serving.discard(version)
