"""A receiver on a slow network: reads a URL at a fixed pace, and tells when it began and ended.

Prints ``ready``, waits for a line with the URL, reads, prints one line of JSON, and ends when its input is closed.
Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from urllib.parse import urlsplit

_BLOCK_BYTES = 64 << 10
_TIMEOUT_S = 120.0


def _read(url: str, bytes_per_s: float) -> dict[str, float]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    connection.request("GET", parts.path)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"expected status 200, got {response.status} {response.reason}")
    began_s = time.monotonic()
    block = bytearray(_BLOCK_BYTES)
    num_bytes = 0
    while got := response.readinto(block):
        num_bytes += got
        time.sleep(max(0.0, began_s + num_bytes / bytes_per_s - time.monotonic()))
    ended_s = time.monotonic()
    connection.close()
    return {"began_s": began_s, "ended_s": ended_s, "num_bytes": num_bytes}


def main() -> None:
    print("ready", flush=True)
    print(json.dumps(_read(sys.stdin.readline().strip(), float(sys.argv[1]))), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
