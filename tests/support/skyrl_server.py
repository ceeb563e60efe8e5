"""Starts the server of the wheel ``skyrl`` with the vLLM and the Python that are here.

SkyRL 0.4.0 was made for vLLM 0.30 and Python 3.12.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

# SkyRL has one in a model of pydantic, which refuses it below Python 3.12.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]

from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor  # type: ignore[import-not-found]  # noqa: E402

if __name__ == "__main__":
    vllm_server_actor.main(sys.argv[1:])
