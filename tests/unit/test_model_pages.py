"""The pages of threats and failures name a test for each row, and files: all of them are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("threat-model.md", "failure-model.md")]

_ROW = re.compile(r"^\| ([A-Z]\d+) \|", re.MULTILINE)
_ITEM = re.compile(r"^- ([A-Z]\d+[ ,].*(?:\n  .*)*)", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_TEST_FILE = re.compile(r"[\w/]+/test_\w+\.py")
_OTHER_FILE = re.compile(r"[\w/]+\.py")
_TEST = re.compile(r"test_\w+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_test_that_a_page_names_is_in_the_file_that_it_names(page: Path) -> None:
    content, num_found = "", 0
    for name in _CODE.findall(page.read_text()):
        if _TEST_FILE.fullmatch(name):
            content = (ROOT / "tests" / name).read_text()
        elif _TEST.fullmatch(name):
            assert f"def {name}(" in content
            num_found += 1
    assert num_found > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_row_has_a_test(page: Path) -> None:
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        told = " ".join(_CODE.sub("", item) for item in _ITEM.findall(section))
        rows = _ROW.findall(section)
        assert len(rows) == len(set(rows))
        assert [row for row in rows if not re.search(rf"\b{row}\b", told)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_other_file_that_a_page_names_is_there(page: Path) -> None:
    directory = ROOT
    for name in _CODE.findall(page.read_text()):
        if not _OTHER_FILE.fullmatch(name) or _TEST_FILE.fullmatch(name):
            continue
        if "/" not in name and (directory / name).exists():
            continue  # a neighbour of the one before
        found = [root / name for root in (ROOT, ROOT / "ft_transport", ROOT / "tests") if (root / name).exists()]
        assert found, name
        directory = found[0].parent
