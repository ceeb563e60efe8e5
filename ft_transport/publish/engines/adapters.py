"""The adapters that an engine serves: their names, and their versions.

vLLM, SGLang and SkyRL's server list them at ``GET /v1/models``. An adapter's card has its name as ``id``, the directory
that it was loaded from as ``root`` and the base model as ``parent`` (vllm/entrypoints/openai/models/serving.py;
sglang/srt/entrypoints/http_server.py, ``available_models``).
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
    """Return why an engine must not get an adapter; ``None`` if it may.

    Args:
        engine: An engine with ``adapter_features``, as `Engine` describes; its ``adapter_gaps`` are the
            `MODULE_FEATURES` that it does not apply.
        features: The adapter's features beyond plain LoRA, see `features_of`.
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
        f"expected an adapter that the engine {engine.url} applies; {type(engine).__name__} does not apply {asked}, so "
        f"that its policy would be another one; {advice}"
    )


def check_applied(engine: Engine, delivery: Delivery) -> None:
    """Refuse an adapter on disk, also of an earlier release, for an engine that was added later.

    Raises:
        EngineRefusedError: Names the feature that the engine does not apply.
    """
    if delivery.kind == "weights":
        return
    with suppress(OSError, ValueError, SafetensorError):  # The engine itself reports it.
        if reason := refusal(engine, features_in(delivery.directory)):
            raise EngineRefusedError(reason, body=reason, peer=engine.url)


def version_in(path: str) -> int | None:
    """Return the version whose directory this is, ``None`` for any other directory."""
    match = _DIRECTORY.fullmatch(PurePath(path).name)
    return int(match[1]) if match is not None else None


def adapter_name(template: str, version: int) -> str:
    """Return an engine's name for an adapter."""
    return template.replace("{version}", str(version))


def older_names(template: str, names: Iterable[str], version: int) -> list[str]:
    """Return the names that the template gives to earlier versions; none if it gives all versions the same name."""
    before, has_number, after = template.partition("{version}")
    older = []
    for name in names:
        number = name[len(before) : len(name) - len(after)]
        if has_number and number.isdecimal() and name == f"{before}{number}{after}" and int(number) < version:
            older.append(name)
    return older


async def adapters_served(connection: EngineConnection) -> dict[str, str]:
    """Return the adapters that an engine serves, and the directory that each was loaded from.

    Raises:
        EngineRefusedError: The answer is not a list of models.
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
    """Return the newest version among the adapters that an engine serves under their names, ``None`` without any.

    Raises:
        EngineRefusedError: The answer is not a list of models.
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
    """Make an engine serve an adapter, and no older ones besides. Return the version that the engine confirms.

    Args:
        connection: Connection to the engine.
        delivery: The version.
        template: Name by which requests select the adapter; ``{version}`` in it stands for the version.
        load: Loads the adapter under a name; gets whether the engine already serves another adapter under that name.
        unload: Unloads the adapter of a name, after this function has returned; ``None`` to unload none.
        unload_after: How long an adapter stays loaded after the next one was written.

    Raises:
        EngineRefusedError: The engine did not load the adapter, or serves another version.
        EngineUnreachableError: The engine did not answer.
    """
    name = adapter_name(template, delivery.version)
    served = await adapters_served(connection)
    if served.get(name) != str(delivery.directory):
        await load(name, name in served)
    # The earlier list is outdated: the engine may have loaded an adapter whose delivery was late and given up.
    served = await adapters_served(connection)
    root = served.get(name, "")
    version = version_in(root)
    if version is None or Path(root).parent != delivery.directory.parent:
        raise EngineRefusedError(
            f"expected the adapter {name!r}, loaded from {delivery.directory}, among those that the engine serves; it "
            f"serves {served or 'none'}",
            peer=connection.url,
        )

    if unload is not None:
        older = {old: served[old] for old in older_names(template, served, version)}
        replaced = _replaced_before(older, delivery, unload_after)
        connection.afterwards(_unload(connection, {old: version_in(older[old]) for old in replaced}, unload))
    return version


def _replaced_before(older: Mapping[str, str], newest: Delivery, age: timedelta) -> list[str]:
    """Return the names of adapters whose successor is at least `age` older than the newest, by the files' clock."""
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
        with suppress(EngineRefusedError):  # Costs the engine memory; the next version retries it.
            await unload(name)
            if version is not None:
                connection.serving.discard(version)
