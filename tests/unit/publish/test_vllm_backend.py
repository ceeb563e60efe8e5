"""The weight-transfer backend of vLLM's workers, with stand-ins for vLLM: what it refuses, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_workers import Factory, Workers, backend_module

from ft_transport import ConfigurationError, VLLMEngine

WEIGHTS = {"weight": torch.zeros(3)}


def test_the_backend_is_registered_once() -> None:
    with backend_module(1) as module:
        module.register()
        module.register()
        assert Factory._registry == {"ft_transport": module.PullingBackend}


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"version": True},
        {"version": -1},
        {"version": 10**18},
        {"version": "1"},
        {"version": 1, "address": 5},
        {"version": 1, "address": ""},
        {"version": 1, "address": "ftp://x"},
        {"version": 1, "address": "http://\ud800"},
        {"version": 1, "address": "http://127.0.0.1:9/", "signature": []},
    ],
)
def test_what_is_no_request_of_a_publisher_is_refused_and_the_next_call_works(request_fields: dict[str, Any]) -> None:
    with backend_module(2) as module:
        workers = Workers(module, WEIGHTS, 2)
        with pytest.raises(RuntimeError, match=r"expected an order of this package's publisher \(malformed\)"):
            workers.call("init", request_fields)
        for method in ("start", "update", "finish"):
            workers.call(method, {})
        with pytest.raises(RuntimeError, match="not_loaded"):
            workers.call("init", {"version": 1})
        assert not any(model.loads for model in workers.models)


def test_without_a_token_workers_fetch_from_the_loopback_alone() -> None:
    with backend_module(1) as module:
        workers = Workers(module, WEIGHTS)
        with pytest.raises(RuntimeError, match="source_refused"):
            workers.call("init", {"version": 1, "address": "http://192.0.2.1:80/checkpoint/"})


def test_pulls_and_update_info_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="expected pulls or update_info, got both"):
        VLLMEngine("http://host:1", update_info=lambda _: {}, pulls=True)
