"""The names by which a server on the loopback is asked: a page in a browser that leads its own name there is refused.

A browser lets a page read what comes from the page's own name. Whoever owns that name can have it stand for 127.0.0.1
from one moment to the next (DNS rebinding), but not keep the browser from saying in ``Host`` which name it asks.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final

_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:[0-9]*)?", re.ASCII)
REFUSAL: Final = "expected to be asked by an address, localhost or a name of this host"


class OwnNames:
    """What may stand in the ``Host`` of a request.

    Args:
        names: Hosts beside ``localhost``, the name of this host and every address, each with a port or without.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {_host_of(each) for each in ("localhost", socket.gethostname(), *names)}

    def has(self, header: str | None) -> bool:
        """Whether a request with this ``Host``, if it has any, is meant for this server. Every browser sends one."""
        if header is None:
            return True
        host = _host_of(header)
        if host in self._names:
            return bool(host)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def _host_of(header: str) -> str:
    """The host without its port, as hosts are compared; empty if it is none."""
    found = _HOST.fullmatch(header.strip())
    return found[1].strip("[]").removesuffix(".").lower() if found is not None else ""
