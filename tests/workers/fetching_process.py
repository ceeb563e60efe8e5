"""Fetches `latest` from the URL given, in place into tensors of its own, and prints JSON about it.

`fetching_process.py URL NUM_TENSORS BYTES_PER_TENSOR`
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch

from ft_transport import FetchProgress, HTTPTransport, TransportSettings, state_digest


def memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


url, num_tensors, num_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
into = {f"w{index}": torch.full((num_bytes // 4,), -1.0) for index in range(num_tensors)}
addresses = {key: tensor.data_ptr() for key, tensor in into.items()}
progress: list[FetchProgress] = []
transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(
    timedelta(seconds=60), settings=TransportSettings(host="127.0.0.1", on_progress=progress.append)
)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = memory("VmRSS")
received = transport.fetch(url, into=into)
peak = memory("VmHWM")
transport.shutdown()
done = [item.done_bytes for item in progress]
print(
    json.dumps(
        {
            "step": received.step,
            "digest": state_digest(received.state),
            "in_place": all(received.state[key] is into[key] for key in into)
            and all(into[key].data_ptr() == address for key, address in addresses.items()),
            "extra_bytes": peak - before,
            "done_bytes": done,
            "total_bytes": sorted({item.total_bytes for item in progress}),
            "elapsed_ascending": all(a.elapsed_s <= b.elapsed_s for a, b in itertools.pairwise(progress)),
        }
    )
)
