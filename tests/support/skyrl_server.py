"""Starts the server of the wheel ``skyrl`` with the vLLM that is here, which is newer than the one it was made for."""

from __future__ import annotations

import functools
import sys
import typing

import typing_extensions
from vllm.entrypoints.launchers import cli_args  # type: ignore[import-not-found]

# Another part of SkyRL, which the server's package imports, has one in a model of pydantic (Python below 3.12).
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
# Where it was in vLLM 0.23.
sys.modules["vllm.entrypoints.openai.cli_args"] = cli_args

from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor  # type: ignore[import-not-found]  # noqa: E402

vllm_server_actor.create_server_socket = functools.partial(vllm_server_actor.create_server_socket, reuse_port=False)

if __name__ == "__main__":
    vllm_server_actor.main(sys.argv[1:])
