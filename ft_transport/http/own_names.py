"""Checks the host name of requests to a server on the loopback: DNS rebinding from a browser is refused.

A browser lets a page read responses from the page's own host name. The owner of that name can make it resolve to
127.0.0.1 from one moment to the next (DNS rebinding), but the browser still sends the name in ``Host``.
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
    """The hosts that the ``Host`` header of a request may name.

    Args:
        names: Hosts besides ``localhost``, this host's name and every address, each with or without a port.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {_host_of(each) for each in ("localhost", socket.gethostname(), *names)}

    def has(self, header: str | None) -> bool:
        """Whether a request with this ``Host`` header, if any, is for this server. Browsers always send one."""
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
    """Return the normalized host without its port; empty if ``header`` is malformed."""
    found = _HOST.fullmatch(header.strip())
    return found[1].strip("[]").removesuffix(".").lower() if found is not None else ""
