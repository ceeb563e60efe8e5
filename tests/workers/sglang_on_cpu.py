"""A real SGLang server without a GPU: everything is SGLang's but the scheduler (``sglang_scheduler.py``).

Usage: ``sglang_on_cpu.py MODEL PORT ORDERS``. The routes, the tokenizer manager with its LoRA registry and locks, and
the processes that ``launch_server`` starts are those of the installed wheel. Packages of kernels that it imports, and
never calls outside of the scheduler, are modules without content here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

# It looks for torchvision once, and must not find what is below.
import transformers.image_utils  # noqa: F401

_EMPTY = ("triton", "torchvision")


class _Empty(types.ModuleType):
    """Has every name: a class if it begins with a capital letter, else a decorator that changes nothing."""

    __path__: Sequence[str] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[0].isupper()
        value = type(name, (), {"__init__": lambda *_a, **_k: None}) if is_class else _Empty(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **_options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _EMPTY:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None:
        """There is nothing in it."""


# Also in the processes that SGLang spawns, which import this program first.
sys.meta_path.insert(0, _Finder())


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang_scheduler import ORDERS, run_scheduler

    model, port, orders = sys.argv[1:]
    os.environ[ORDERS] = orders
    arguments = ServerArgs(
        model_path=model,
        device="cpu",
        host="127.0.0.1",
        port=int(port),
        skip_tokenizer_init=True,  # requests and answers are token ids
        skip_server_warmup=True,
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["q_proj", "v_proj"],
    )
    launch_server(arguments, run_scheduler_process_func=run_scheduler)


if __name__ == "__main__":
    main()
