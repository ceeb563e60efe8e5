"""What is uploaded: a wheel and an sdist that build from the tree, pass twine's check, and work away from the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("twine")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[2]
_MADE = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "results")
_TIMEOUT_S = 120.0


def _run(command: list[str], directory: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=directory,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The wheel, which is built from the sdist, and the sdist."""
    directory = tmp_path_factory.mktemp("packaging")
    tree, dist = directory / "tree", directory / "dist"
    shutil.copytree(_ROOT, tree, ignore=shutil.ignore_patterns(*_MADE), symlinks=True)
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)], tree)
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    yield {"wheel": wheel, "sdist": sdist}
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def clean_environment(
    distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A virtual environment with the wheel alone, and a directory outside the tree; dependencies come from this one."""
    directory = tmp_path_factory.mktemp("clean")
    environment = directory / "environment"
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)], directory)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(distributions["wheel"])], directory)
    [packages] = environment.glob("lib/python*/site-packages")
    # Directories that a .pth names are searched, and the .pth files in them are not: no editable install comes in.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield environment / "bin", directory
    shutil.rmtree(directory)


def test_both_pass_twines_check(distributions: dict[str, Path]) -> None:
    said = _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions.values())], _ROOT)

    assert said.count("PASSED") == 2


def test_the_wheel_has_the_packages_with_their_types_and_nothing_else(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = wheel.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        information = wheel.read(metadata).decode()

    places = {name.split("/")[0] for name in names}
    assert places == {"ft_transport", "manager", metadata.split("/")[0]}
    assert {"ft_transport/py.typed", "manager/py.typed"} <= set(names)
    assert [name for name in names if "test" in name.lower()] == []
    in_tree = {
        str(path.relative_to(_ROOT)) for each in ("ft_transport", "manager") for path in (_ROOT / each).rglob("*.py")
    }
    assert in_tree <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "Provides-Extra: torchft" in information


def test_what_the_packages_read_at_run_time_is_in_the_wheel(distributions: dict[str, Path]) -> None:
    others = {
        str(path.relative_to(_ROOT))
        for each in ("ft_transport", "manager")
        for path in (_ROOT / each).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        assert others <= set(wheel.namelist())


def test_the_sdist_can_be_tested_and_documented(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    wanted = ["Makefile", "mkdocs.yml", "constraints.txt", "tests/conftest.py", "docs/quickstart.md", "CHANGELOG.md"]
    assert [name for name in wanted if name not in names] == []
    in_tree = {
        str(path.relative_to(_ROOT))
        for each in ("docs", "tests")
        for path in (_ROOT / each).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert in_tree <= names
    assert [name for name in names if name.endswith((".pyc", ".log")) or name.startswith((".venv", ".git/"))] == []


@pytest.mark.parametrize("package", ["ft_transport", "manager"])
def test_each_public_name_is_imported_away_from_the_tree(clean_environment: tuple[Path, Path], package: str) -> None:
    programs, directory = clean_environment
    program = (
        f"import {package}, os\n"
        f"names = [getattr({package}, name) for name in {package}.__all__]\n"
        f"print(len(names), os.path.dirname({package}.__file__))"
    )

    said = _run([str(programs / "python"), "-W", "ignore", "-c", program], directory)

    num_names, place = said.split()[-2:]
    assert int(num_names) > 20
    assert Path(place).is_relative_to(programs.parent)


def test_the_command_is_installed(clean_environment: tuple[Path, Path]) -> None:
    programs, directory = clean_environment

    said = _run([str(programs / "ft-transport"), "--help"], directory, COLUMNS="120", TERM="dumb")

    assert "ft-transport" in said
    assert "--help" in said
