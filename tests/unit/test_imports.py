"""What an import brings along: in processes of their own, because this one has imported everything long ago."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import ft_transport
import manager

EXPENSIVE = (
    "aiohttp",
    "ft_transport.checkpoint.store",
    "ft_transport.http.server.server",
    "ft_transport.publish",
    "ft_transport.publish.publisher",
    "ft_transport.checkpoint",
    "ft_transport.transport",
    "sympy",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)


def run(program: str) -> Any:
    """What the program prints, from JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """What a process has imported after each thing that it does, one after the other."""
    *kinds, first_uses = run("""
import json, os, sys, threading
import torch
import ft_transport, manager

uses = [
    lambda: ft_transport.Publisher,
    lambda: ft_transport.HTTPTransport,
    lambda: ft_transport.WeightReceiver,
    lambda: ft_transport.CheckpointStore,
    lambda: ft_transport.HTTPTransport,
    lambda: manager.Manager,
    lambda: manager.StateManager,
]
found = [None] * len(uses)
together = threading.Barrier(len(uses))

def use(index):
    together.wait()
    found[index] = uses[index]().__name__

reading, writing = os.pipe()
if not os.fork():
    threads = [threading.Thread(target=use, args=(index,)) for index in range(len(uses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(writing, json.dumps(found).encode())
    os._exit(0)
os.close(writing)
first_uses = json.load(open(reading))
os.wait()

from manager import Manager, ManagerConfig, StateManager, guard_local_sgd

loaded = [sorted(sys.modules)]
from datetime import timedelta
from urllib.request import urlopen
import torch
from ft_transport import HTTPTransport, TransportSettings

transport = HTTPTransport(settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
loaded.append(sorted(sys.modules))
transport.send_checkpoint([1], 1, {"weight": torch.ones(3)}, timedelta(seconds=30))
transport.fetch(transport.metadata(), 1, into={"weight": torch.zeros(3)})
loaded.append(sorted(sys.modules))

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2)).sum().backward()
manager = StateManager(checkpoint_transport=transport)
manager.register("model", model)
manager.register("optimizer", optimizer)
with manager.attach(optimizer):
    loaded.append(sorted(sys.modules))
    manager.start_step(0)
    optimizer.step()
    manager.start_step(1)
    loaded.append(sorted(sys.modules))
with urlopen(transport.metadata().removesuffix("/checkpoint/") + "/metrics", timeout=20) as answer:
    assert b"ft_transport_build_info" in answer.read()
loaded.append(sorted(sys.modules))
manager.shutdown()
transport.shutdown()
print(json.dumps([*loaded, first_uses]))
""")
    names = ("managers", "constructed", "fetched", "attached", "stepped", "scraped")
    return {**dict(zip(names, kinds, strict=True)), "first uses": first_uses}


def test_the_manager_does_without_what_is_expensive_until_it_is_used(loaded: dict[str, list[str]]) -> None:
    assert "manager.manager" in loaded["managers"]
    assert [name for name in EXPENSIVE if name in loaded["managers"]] == []


def test_prometheus_client_is_imported_by_the_first_scrape(loaded: dict[str, list[str]]) -> None:
    assert not [name for name in loaded["stepped"] if name.startswith("prometheus_client")]
    assert "prometheus_client" in loaded["scraped"]


def test_a_fetch_and_a_step_of_plain_tensors_import_nothing(loaded: dict[str, list[str]]) -> None:
    """What the transport needs comes with its constructor: not on its event loop, in a step or while others wait."""
    constructed, fetched = loaded["constructed"], loaded["fetched"]
    attached, stepped = loaded["attached"], loaded["stepped"]
    assert "aiohttp" in constructed
    assert "torch.distributed.tensor" not in fetched
    ours = ("ft_transport", "manager", "aiohttp", "msgspec", "numpy", "xxhash")
    late = (set(fetched) - set(constructed)) | (set(stepped) - set(attached))
    assert [name for name in late if name.startswith(ours)] == []


def test_many_threads_may_be_the_first_to_use_a_name(loaded: dict[str, list[str]]) -> None:
    """In a fork of that process, before it has used any."""
    assert loaded["first uses"] == [
        *("Publisher", "HTTPTransport", "WeightReceiver", "CheckpointStore", "HTTPTransport"),
        *("Manager", "StateManager"),
    ]


def test_wire_imports_on_a_python_without_torch_and_aiohttp() -> None:
    imported = run("""
import json, pkgutil, sys
sys.modules["torch"] = sys.modules["aiohttp"] = None
import ft_transport.wire
names = [each.name for each in pkgutil.walk_packages(ft_transport.wire.__path__, "ft_transport.wire.")]
for name in names:
    __import__(name)
print(json.dumps(names))
""")
    assert "ft_transport.wire.manifest" in imported


@pytest.mark.parametrize("package", [ft_transport, manager], ids=["ft_transport", "manager"])
def test_a_facade_gives_the_names_that_type_checkers_see(package: ModuleType) -> None:
    declared = set()
    for statement in ast.walk(ast.parse(inspect.getsource(package))):
        if isinstance(statement, ast.ImportFrom):
            assert statement.module is not None
            for alias in statement.names:
                assert getattr(package, alias.name) is getattr(import_module(statement.module), alias.name)
                if alias.asname is not None:
                    assert alias.asname == alias.name
                    declared.add(alias.name)
    assert set(package.__all__) == declared
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("package", [ft_transport, manager], ids=["ft_transport", "manager"])
def test_a_name_that_a_facade_does_not_have_is_refused(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Sender'"):
        _ = package.Sender
