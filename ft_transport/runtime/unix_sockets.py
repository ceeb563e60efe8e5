"""Unix sockets: addresses that processes of one user share, and the user at the other end of a connection."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

_DIGEST_BYTES: Final = 16
_CREDENTIALS: Final = struct.Struct("3i")
_OVERFLOW_USER: Final = 65534
"""User id of every user without an id in this user namespace, so two processes with this id may differ in user."""


def shared_address(*parts: str) -> str:
    """Return an abstract Unix address (``man 7 unix``) that is the same in all processes of this user.

    Args:
        parts: Texts that name what the processes share. Other texts give another address.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part.encode(errors="surrogateescape")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return f"\0ft-transport/{os.geteuid()}/{digest.hexdigest()}"


def listening_addresses(prefix: str) -> list[str]:
    """Return the abstract Unix addresses on this host that begin with a prefix. Needs the proc file system of Linux."""
    # The kernel shows the zero byte of an abstract address as "@".
    shown = prefix.replace("\0", "@")
    try:
        lines = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    names = {line.rpartition(" ")[2] for line in lines}
    return sorted(prefix + name[len(shown) :] for name in names if name.startswith(shown))


def is_own_user(connected: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as this process's user."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _process, user, _group = _CREDENTIALS.unpack(packed)
    return bool(user == os.geteuid() != _OVERFLOW_USER)
