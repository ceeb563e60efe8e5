"""Names by which versions are known: of their directories, and of adapters in engines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from ft_transport.errors import ConfigurationError

_DIRECTORY: Final = re.compile(r"version-(0|[1-9][0-9]*)")


def directory_name(version: int) -> str:
    """Of a version."""
    return f"version-{version}"


def version_in(path: str) -> int | None:
    """The version whose directory this is, ``None`` if it is no such directory."""
    match = _DIRECTORY.fullmatch(PurePath(path).name)
    return int(match[1]) if match is not None else None


def adapter_name(template: str, version: int) -> str:
    """What an engine calls an adapter."""
    return template.replace("{version}", str(version))


def older_names(template: str, names: Iterable[str], version: int) -> list[str]:
    """Those that the template gives to versions before this one; none if it gives all the same."""
    before, has_number, after = template.partition("{version}")
    older = []
    for name in names:
        number = name[len(before) : len(name) - len(after)]
        if has_number and number.isdecimal() and name == f"{before}{number}{after}" and int(number) < version:
            older.append(name)
    return older


def checked_url(url: str) -> str:
    """The base URL of an engine, without a slash at its end.

    Raises:
        ConfigurationError: It is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigurationError(f"expected the base URL of an engine, http://host:port, got {url!r}")
    return url.rstrip("/")
