"""A host of shardcast's tree: ``shardcast_host.py ROLE DIRECTORY [URL…]``, in an environment that has it.

ROLE is ``origin``, ``middle`` (passes on what it has of the URLs, and assembles it too) or ``client``. A line of JSON
on the standard input and output each: an origin is told a file and serves it, a middle node is told to look at the
origin's list, and all but the origin to begin; they say when they have the whole file. It ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import shardcast.client
import shardcast.utils
from shardcast.client_node import ClientNode
from shardcast.middle_node import MiddleNode
from shardcast.origin_server import OriginServer

_PORT = 8000
_DUMMY = "data1.bin"
"""Fetched from each server when a client is made, to see how fast it is."""
_NEVER_S = 1_000_000


def main() -> None:
    role, directory, *upstream = sys.argv[1:]
    place = Path(directory)
    logging.getLogger("shardcast.utils").setLevel(logging.ERROR)
    # Clients of one machine would overwrite each other's list of versions beside the package.
    shardcast.client.__file__ = str(place / "package" / "client.py")
    (place / _DUMMY).write_bytes(b"x" * 1024)
    if role == "origin":
        origin = OriginServer(directory, port=_PORT)
        _say({"ready": True})
        origin.broadcast(json.loads(sys.stdin.readline())["file"])
        _say({"ready": True})
    elif role == "middle":
        # It looks for versions when it is made, when the origin has none, and else only now and then.
        middle = MiddleNode(upstream, directory, port=_PORT, check_interval=_NEVER_S)
        _say({"ready": True})
        sys.stdin.readline()
        listing = str(place / "distribution.txt")
        middle.downloader.download_file("distribution.txt", listing, update_metrics=False)
        _say({"ready": True})
        sys.stdin.readline()
        for version, info in shardcast.utils.parse_distribution_file(listing).items():
            middle._process_version(version, info)
        file = _assemble(place)
        _say({"ended_s": time.monotonic(), "file": file})
    else:
        client = ClientNode(upstream, directory)
        _say({"ready": True})
        sys.stdin.readline()
        file = client.download_version("v1", str(place / "state.bin"))
        _say({"ended_s": time.monotonic(), "file": file})
    sys.stdin.read()
    os._exit(0)


def _assemble(place: Path) -> str:
    target = place / "state.bin"
    with target.open("wb") as file:
        for shard in sorted((place / "v1").glob("shard_*.bin")):
            file.write(shard.read_bytes())
    return str(target)


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
