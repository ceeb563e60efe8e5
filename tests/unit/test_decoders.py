"""No thread is the first to decode a type, for msgspec may end the process then: see ``banned-api`` in pyproject.toml.

What it has to know of a type it finds out with Python of its own, here once for all, when a module makes a decoder.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from programs import run

_ROOT = Path(__file__).parents[2]


def _printed(program: str) -> Any:
    """What a new process prints, from JSON."""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_found_out_of_a_type_when_it_is_first_decoded() -> None:
    found_out, control = _printed("""
import json, sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec

from ft_transport.coordination import votes
from ft_transport.errors import TransportError
from ft_transport.http.client.responses import begin_session
from ft_transport.http.client.responses import make_challenge
from ft_transport.http.client.peer_status import ask_status, fetch_status
from ft_transport.credentials import Keys
from ft_transport.telemetry.record import decode_record
from ft_transport.telemetry.process_state import decode_state
from ft_transport.wire.delta import decode_delta
from manager.errors import QuorumError
from manager.quorum.members import SignedReports

@dataclass
class Unknown:
    number: int

class Connection:
    peer = "peer:1"
    __enter__ = lambda self: self
    __exit__ = lambda self, *_: None
    get = lambda self, *_, **__: SimpleNamespace(headers={})
    read_body = lambda self, *_, **__: b"{}"

keys = Keys.of("0123456789abcdef" * 4)
challenge = make_challenge(keys, "peer:1")
stranger = SimpleNamespace(replica_id="other", step=1, store_address="", data={})
decodes = {
    "state": lambda: decode_state(b"{}"),
    "record": lambda: decode_record(b"{}"),
    "vote": lambda: votes.decode(b""),
    "votes": lambda: votes.decode_all(b"[]", 1),
    "error": lambda: votes.describe(TransportError("it failed", step=3, path="weight")),
    "status": lambda: ask_status("peer:1", lambda *_: Connection(), within_s=1.0),
    "session": lambda: begin_session(keys, challenge, b"{}"),
    "delta": lambda: decode_delta((1).to_bytes(8, "little") + b"x"),
    "member": lambda: SignedReports(None).members_of([stranger], "own"),
}
own_python = str(Path(msgspec.__file__).parent)

def calls_of(decode):
    calls = []
    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(own_python):
            calls.append(frame.f_code.co_name)
    sys.setprofile(watch)
    try:
        decode()
    except (TransportError, QuorumError):
        pass
    finally:
        sys.setprofile(None)
    return calls

found_out = {name: calls for name, decode in decodes.items() if (calls := calls_of(decode))}
print(json.dumps([found_out, calls_of(lambda: msgspec.convert({"number": 1}, Unknown))]))
""")
    assert control, "msgspec finds out what a type is some other way now, which this test does not see"
    assert found_out == {}


def test_a_class_that_several_modules_decode_is_known_from_its_own_module() -> None:
    """Each of them would find out what it is, and threads may import them at once."""
    elsewhere = _printed("""
import json, pkgutil
from collections import defaultdict
from importlib import import_module

import msgspec
from msgspec import inspect

import ft_transport, manager

decoding = defaultdict(set)

def note(part, module):
    if isinstance(part, (tuple, list)):
        for each in part:
            note(each, module)
    elif isinstance(part, (inspect.Type, inspect.Field)):
        kind = getattr(part, "cls", None)
        if module in decoding[kind]:
            return
        if kind is not None:
            decoding[kind].add(module)
        for name in part.__struct_fields__:
            note(getattr(part, name), module)

for package in (ft_transport, manager):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.endswith((".__main__", ".verl_backend", ".vllm_backend")) or ".torchtitan" in found.name:
            continue  # a program; frameworks of other environments
        for value in vars(import_module(found.name)).values():
            if isinstance(value, (msgspec.json.Decoder, msgspec.msgpack.Decoder)):
                note(inspect.type_info(value.type), found.name)
assert "ft_transport.telemetry.record" in {module for modules in decoding.values() for module in modules}
print(json.dumps({
    str(kind): sorted(modules)
    for kind, modules in decoding.items()
    if len(modules) > 1 and kind.__module__ not in modules
}))
""")
    assert elsewhere == {}


def test_decoders_are_made_by_modules() -> None:
    late = []
    for path in (path for package in ("ft_transport", "manager") for path in (_ROOT / package).rglob("*.py")):
        source = path.read_text()
        if "Decoder(" not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                late += [
                    f"{path.relative_to(_ROOT)}:{node.lineno}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Decoder")
                ]
    assert late == []
