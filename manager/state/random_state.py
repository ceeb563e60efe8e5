"""Random number generators as an object to register."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RandomState:
    """The global generators of Python, numpy (if it is imported) and torch, on the CPU and on CUDA devices.

    Register it like a module. As ``local`` state it lets a replica resume its own random numbers; as ``replicated``
    state it lets a recovered replica draw the same numbers as its peer.
    """

    def state_dict(self) -> dict[str, object]:
        """Return the generators' states; tensors in it are copies, uint8 on the CPU."""
        state: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators that the state has; others stay unchanged."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(state["numpy"])
        if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
