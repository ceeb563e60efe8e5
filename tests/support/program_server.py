"""A process that has imported torch, and forks a Python program whenever `programs.Program` asks for one.

A program starts in a tenth of a second instead of three. It finds what a new interpreter would find: its own
arguments, environment, directory, streams and search path.

Usage: ``program_server.py LISTENER ALIVE``, two descriptors: a socket to accept requests on, and a pipe that ends when
the test process does. This process has one thread, for it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

MAX_DESCRIPTORS = 64
_LENGTH_BYTES = 4
_INTERRUPTED = 128 + signal.SIGINT
END_VARIABLE = "FT_TESTS_END"
"""Where it is set, a program ends as an interpreter does, which takes half a second, and not right behind its code."""


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Reads so many bytes; raises `EOFError` where the other end closes before."""
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def _preload() -> None:
    """Imports what nearly every program imports. Nothing here may start a thread: no thread survives a fork."""
    import aiohttp.web  # noqa: F401
    import msgspec  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo  # the first optimizer imports it, for half a second
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import ft_transport
    import manager

    for facade in (ft_transport, manager):
        for name in facade.__all__:
            getattr(facade, name)


def serve(listener: socket.socket, alive: int) -> None:
    """Forks a program for each connection, and sends its process id, and its wait status when it has ended."""
    # A program has its own directory in front, and what its own environment names.
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base_path = [place for place in sys.path[1:] if place not in places]
    _preload()
    # What is frozen is not visited by the collector, whose marks would have each child copy the pages; and it stays so
    # in the children, whose collections are then of what is their own.
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(alive, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd == alive:
                for pid, _connection in running.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fd == listener.fileno():
                connection, _ = listener.accept()
                try:
                    pid = _start(connection, base_path)
                except _EndError:
                    for each in (listener, connection, *(other for _, other in running.values())):
                        each.detach()  # the numbers are the program's
                    raise
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, connection
                selector.register(pidfd, selectors.EVENT_READ)
                _send(connection, pid)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, connection = running.pop(key.fd)
                _send(connection, os.waitpid(pid, 0)[1])
                connection.close()


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # a test process that has died asks for no status
        connection.sendall(number.to_bytes(_LENGTH_BYTES, "big"))


def _start(connection: socket.socket, base_path: list[str]) -> int:
    head, descriptors, _flags, _address = socket.recv_fds(connection, _LENGTH_BYTES, MAX_DESCRIPTORS)
    request = json.loads(receive_exactly(connection, int.from_bytes(head, "big")))
    pid = os.fork()
    if not pid:
        try:
            _become(request, descriptors, base_path)
            ends_as_interpreter = os.environ.pop(END_VARIABLE, None) is not None
            status = _run(request["kind"], request["program"])
            if ends_as_interpreter:
                raise _EndError(status)
            _leave()
        except _EndError:
            raise
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status & 0xFF)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become(request: dict[str, Any], descriptors: list[int], base_path: list[str]) -> None:
    """Puts on what a new process is given."""
    if request["is_new_session"]:
        os.setsid()
    # By way of numbers that nothing has, since what comes may have the number where something else has to go.
    free = max(1 << 10, *descriptors, *request["descriptors"]) + 1
    moved = [os.dup2(descriptor, free + at) for at, descriptor in enumerate(descriptors)]
    for source, target in zip(moved, request["descriptors"], strict=True):
        os.dup2(source, target)
    first = 3
    for kept in sorted({*request["descriptors"], free + len(moved)} - {0, 1, 2}):
        os.closerange(first, kept)
        first = kept + 1
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    os.chdir(request["directory"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw: Any = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw), encoding="utf-8", line_buffering=number == 2,
            write_through=is_unbuffered, errors="strict" if number == 1 else "backslashreplace",
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    warnings.resetwarnings()
    warnings._processoptions(request["filters"])  # type: ignore[attr-defined]
    sys.argv = request["argv"]
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [request["first_place"], *places, *base_path]
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:  # read when torch was imported
        import torch

        torch.set_num_threads(int(threads))


def _run(kind: str, program: str) -> int:
    """Runs a program as ``__main__`` up to its end; returns its exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    status = 0
    try:
        if kind == "module":
            runpy._run_module_as_main(program)  # type: ignore[attr-defined]
        else:
            source, name = (program, "<string>") if kind == "code" else (Path(program).read_text(), program)
            if kind == "script":
                main.__file__ = program
            exec(compile(source, name, "exec"), main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = _INTERRUPTED
    except BaseException:
        traceback.print_exc()
        status = 1
    return status


class _EndError(SystemExit):
    """Ends the interpreter of a program."""


def _leave() -> None:
    """As an interpreter ends, but for what the exit of a process does anyway."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
