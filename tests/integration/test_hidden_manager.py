"""Programs whose own module ``manager`` hides the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import run

_FORGET = """
import sys

for name in [name for name in sys.modules if name.partition(".")[0] in ("ft_transport", "manager")]:
    del sys.modules[name]  # imported before the fork
"""
_PROGRAM = """
from ft_transport.manager import Manager, RandomState
import ft_transport.manager, manager, torch

assert manager.__file__ == {file!r}, manager.__file__
assert manager.mine == 1
assert not [name for name in sys.modules if name.startswith("manager.integrations.")], "their frameworks may be missing"
assert ft_transport.manager.Manager is Manager and "Manager" in dir(ft_transport.manager)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
replica = Manager(min_replica_size=1)
replica.register("model", model)
replica.register("optimizer", optimizer)
replica.register("random", RandomState(), scope="local")
replica.attach(optimizer)
for _ in range(3):
    replica.start_quorum()
    optimizer.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    replica.average_gradients(model)
    assert replica.should_commit()
    optimizer.step()
replica.shutdown()
print("trained", replica.current_step())
"""


@pytest.mark.parametrize("is_loaded_before", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_program_with_a_manager_of_its_own_trains_through_the_second_door(
    tmp_path: Path, is_loaded_before: bool
) -> None:
    pytest.importorskip("torchft")
    file = tmp_path / "manager.py"
    file.write_text("mine = 1\n")
    script = tmp_path / "train.py"
    script.write_text(_FORGET + ("import manager\n" if is_loaded_before else "") + _PROGRAM.format(file=str(file)))

    done = run([sys.executable, str(script)], timeout=100, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "trained 3" in done.stdout


def test_a_package_with_a_module_of_the_same_name_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "manager").mkdir()
    for name in ("__init__", "config", "mine"):
        (tmp_path / "manager" / f"{name}.py").touch()
    script = tmp_path / "train.py"
    script.write_text(_FORGET + "import ft_transport.manager\n")

    done = run([sys.executable, str(script)], timeout=100, cwd=tmp_path)

    assert done.returncode == 1
    assert "both have config; rename yours" in done.stderr


def test_without_one_both_doors_lead_to_the_same_classes() -> None:
    import ft_transport.manager
    import manager

    assert ft_transport.manager.Manager is manager.Manager
    assert set(manager.__all__) <= set(dir(ft_transport.manager))
