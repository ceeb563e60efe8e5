"""The site builds without a warning, needs nothing from outside, and has a place for every public name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import ft_transport
import manager

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[2]
_LOADED_BY = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "audio": "src"}


def _build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            str(root / "mkdocs.yml"),
            "-d",
            str(site),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("site")
    built = _build(_ROOT, path)
    assert built.returncode == 0, built.stderr
    yield path
    shutil.rmtree(path)


class _Loads(HTMLParser):
    """What a browser loads by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if (
            (name := _LOADED_BY.get(tag))
            and (address := dict(attrs).get(name))
            and dict(attrs).get("rel") != "canonical"
        ):
            self.found.append(address)


def test_no_page_loads_anything_from_outside(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        assert loads.found
        assert [address for address in loads.found if re.match(r"(\w+:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*", sheet.read_text()) == []


@pytest.mark.parametrize("package", [ft_transport, manager], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(site: Path, package: Any) -> None:
    page = (site / "reference" / f"{package.__name__}.html").read_text()
    errors = (site / "reference" / "errors.html").read_text()
    other_names = {"ReplicaProcessGroup", "ConfigError"}  # of a union, and of ConfigurationError

    missing = [
        name
        for name in package.__all__
        if f'id="{package.__name__}.{name}"' not in page
        and f'id="{package.__name__}.errors.{name}"' not in errors
        and name not in other_names
    ]

    assert missing == []


def test_files_beside_the_pages_are_pages_and_links_to_them_lead_there(site: Path) -> None:
    home = (site / "index.html").read_text()
    architecture = (site / "architecture.html").read_text()

    assert 'href="architecture.html"' in home
    assert 'href="results.html"' in home
    assert 'href="index.html#words"' in architecture
    assert 'href="contributing.html' in architecture


def test_the_pages_say_their_version_and_not_what_runs_before_a_block(site: Path) -> None:
    page = (site / "checkpoints.html").read_text()

    assert re.search(r"ft-transport \d+\.\d+\.\d+", page)
    assert "run first" not in page
    assert "run first" in (_ROOT / "docs" / "checkpoints.md").read_text()


def test_the_reference_begins_with_what_is_used_first(site: Path) -> None:
    for package, first in (("ft_transport", "HTTPTransport"), ("manager", "Manager")):
        page = (site / "reference" / f"{package}.html").read_text()
        assert re.search(rf'id="{package}\.(\w+)"', page)[1] == first  # type: ignore[index]


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    # To import the packages for the reference takes longer than all the rest.
    shutil.copytree(_ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__", "reference"))
    for name in ("mkdocs.yml", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.md"):
        shutil.copy(_ROOT / name, tmp_path)
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(_ROOT / "benchmarks" / "RESULTS.md", tmp_path / "benchmarks")
    page = tmp_path / "docs" / "quickstart.md"
    page.write_text(page.read_text() + "\n[nowhere](quorum-loop.md#no-such-heading)\n")

    built = _build(tmp_path, tmp_path / "site")

    assert built.returncode != 0
    assert "no-such-heading" in built.stdout + built.stderr
