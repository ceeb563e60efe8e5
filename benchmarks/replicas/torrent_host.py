"""A peer of a swarm of libtorrent: ``torrent_host.py DIRECTORY ADDRESS [DATA]``, in an environment that has it.

A line of JSON on the standard input and output each: a seed, which has DATA, says the torrent; a peer is told the
torrent and everybody's addresses, and says when it has everything. It ends with its input.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from pathlib import Path

import libtorrent

_PORT = 6881
_ALERT_TIMEOUT_MS = 500


def main() -> None:
    directory, address = Path(sys.argv[1]), sys.argv[2]
    # Nobody is looked for: all addresses are told. TCP alone, for its own protocol over UDP was measured to take three
    # times as long. All else is as it is by default.
    session = libtorrent.session(
        {
            "listen_interfaces": f"{address}:{_PORT}",
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "enable_outgoing_utp": False,
            "enable_incoming_utp": False,
            "alert_mask": libtorrent.alert.category_t.status_notification
            | libtorrent.alert.category_t.error_notification,
        }
    )
    if len(sys.argv) > 3:
        torrent = _seed(session, Path(sys.argv[3]))
        _say({"torrent": base64.b64encode(torrent).decode()})
    else:
        _say({"ready": True})
        order = json.loads(sys.stdin.readline())
        _fetch(
            session, directory, base64.b64decode(order["torrent"]), [each for each in order["peers"] if each != address]
        )
        ended_s = time.monotonic()
        _say({"ended_s": ended_s, "file": str(next(path for path in directory.iterdir() if path.is_file()))})
    sys.stdin.read()
    os._exit(0)


def _seed(session: libtorrent.session, data: Path) -> bytes:
    storage = libtorrent.file_storage()
    libtorrent.add_files(storage, str(data))
    torrent = libtorrent.create_torrent(storage)
    libtorrent.set_piece_hashes(torrent, str(data.parent))
    content: bytes = libtorrent.bencode(torrent.generate())
    handle = session.add_torrent(_parameters(content, data.parent, []))
    while not handle.status().is_seeding:
        session.wait_for_alert(_ALERT_TIMEOUT_MS)
        session.pop_alerts()
    return content


def _fetch(session: libtorrent.session, directory: Path, torrent: bytes, peers: list[str]) -> None:
    handle = session.add_torrent(_parameters(torrent, directory, peers))
    # Pieces are verified as they come.
    while not handle.status().is_seeding:
        session.wait_for_alert(_ALERT_TIMEOUT_MS)
        session.pop_alerts()


def _parameters(torrent: bytes, directory: Path, peers: list[str]) -> libtorrent.add_torrent_params:
    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(libtorrent.bdecode(torrent))
    parameters.save_path = str(directory)
    parameters.peers = [(peer, _PORT) for peer in peers]
    parameters.flags &= ~(libtorrent.torrent_flags.auto_managed | libtorrent.torrent_flags.paused)
    return parameters


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
