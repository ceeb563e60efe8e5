"""These need real engines: `make test-engines` has environments for them, and elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from vllm_server import TinyLlama

_TESTS = {
    "vllm": ("vllm", "restarted_vllm", "vllm_pulls", "weight_transfer", "skyrl"),
    "sglang": ("sglang", "sglang_effect"),
    "trl": ("trl",),
}

collect_ignore = [
    f"test_{name}.py" for engine, names in _TESTS.items() if importlib.util.find_spec(engine) is None for name in names
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """What vLLM serves."""
    from vllm_server import TinyLlama

    # The engine has all cores, and several threads of torch's would wait for each other.
    torch.set_num_threads(1)
    return TinyLlama(tmp_path_factory.mktemp("llama"))
