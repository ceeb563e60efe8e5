"""A state is received into frozen weights in read-only memory: refused by name, before a byte comes."""

from __future__ import annotations

import mmap
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_transports import network, state_of

from ft_transport import CheckpointStore, RestoreError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list mappings"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]


def frozen(tensor: torch.Tensor, access: int = mmap.ACCESS_READ) -> torch.Tensor:
    """A copy in a mapped file."""
    with tempfile.TemporaryFile() as file:
        file.write(tensor.numpy().tobytes())
        file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=tensor.dtype)


def into_with(base: torch.Tensor) -> dict[str, Any]:
    return {"a": torch.zeros_like(state_of(1)["a"]), "b": base}


def test_a_fetch_is_refused() -> None:
    base = state_of(1)["b"]
    into = into_with(frozen(base))
    with network() as net:
        with pytest.raises(RestoreError, match=r"read-only mapping: map the file privately.*at b"):
            net.receiver.fetch(net.proxy.url, 1, into=into)
        assert not into["a"].any()
        into["b"] = frozen(base, mmap.ACCESS_COPY)
        received = net.receiver.fetch(net.proxy.url, 1, into=into)
        assert received.state["b"] is into["b"]


def test_a_fetch_into_a_column_is_refused() -> None:
    """It is received elsewhere, and copied at the end."""
    base = frozen(state_of(1)["b"].repeat_interleave(2))
    with network() as net, pytest.raises(RestoreError, match="at b"):
        net.receiver.fetch(net.proxy.url, 1, into=into_with(base[::2]))


def test_loading_a_checkpoint_is_refused(tmp_path: Path) -> None:
    state = state_of(1)
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, state).result()
        with pytest.raises(RestoreError, match="at b"):
            store.load(into=into_with(frozen(state["b"])))
