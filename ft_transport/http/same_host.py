"""Queries to the kernel about sockets between processes of one host: the peer's user, and seals of lent memory."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
_OVERFLOW_USER: Final = 65534
"""User id of every user without an id in this user namespace; it may stand for many users."""
_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1, include/uapi/linux/fcntl.h


def is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket runs as the same user as this one."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _process, user, _group = _CREDENTIALS.unpack(packed)
    return bool(user == os.geteuid() != _OVERFLOW_USER)


def is_sealed(descriptor: int) -> bool:
    """Whether a memory file can neither shrink under a mapping nor be written through a descriptor."""
    wanted = fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:  # no memory file
        return False
