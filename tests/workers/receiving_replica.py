"""A receiver: `receiving_replica.py ours|torchft URL`. For each line on standard input, a step or ``latest``, it
fetches that step and prints the step and the digest of what it got, as JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

from stepping_trainer import digest_of

TIMEOUT = timedelta(seconds=30)


def main(kind: str, url: str) -> None:
    transport: Any
    if kind == "ours":
        from ft_transport import HTTPTransport

        transport = HTTPTransport(TIMEOUT)
    else:
        from torchft.checkpointing.http_transport import HTTPTransport as TorchftTransport

        transport = TorchftTransport(TIMEOUT, num_chunks=0)
    for line in sys.stdin:
        if kind == "ours":
            received = transport.fetch(url, line.strip() if line.strip() == "latest" else int(line), timeout=TIMEOUT)
            step, state = received.step, received.state["user"]
        else:
            step = int(line)
            # torchft nests what was registered once more, under the key of the registration.
            state = transport.recv_checkpoint(0, url, step, TIMEOUT)["user"]["default"]
        print(json.dumps({"step": step, "digest": digest_of(state)}), flush=True)
    transport.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
