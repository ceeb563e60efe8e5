"""The files beside the weights: what may be given, and what a model's directory has."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ft_transport import PublishError, model_files
from ft_transport.publish import files as module
from ft_transport.publish.files import read_files


def test_a_path_is_copied_a_mapping_is_json_and_the_rest_is_the_content(tmp_path: Path) -> None:
    (tmp_path / "merges").write_bytes(b"a b\n")
    config = {"model_type": "llama", "rope_scaling": None, "layers": [1, 2]}
    read = read_files({"merges.txt": tmp_path / "merges", "config.json": config, "vocab": b"\xff", "template": "Grüße"})
    assert json.loads(read_files({"config.json": MappingProxyType(config)})["config.json"]) == config
    assert json.loads(read.pop("config.json")) == config
    assert read == {"merges.txt": b"a b\n", "vocab": b"\xff", "template": "Grüße".encode()}


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a.json", "sub/a.json", "sub\\a.json", "/a.json", ".hidden", "a\0b", "a" * 256, "a\udcff", 3],
    ids=repr,
)
def test_a_name_that_leads_elsewhere_is_refused(name: Any) -> None:
    with pytest.raises(PublishError, match="expected the name of a file in the version's directory"):
        read_files({name: b""})


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"],
)
def test_a_name_of_the_versions_own_is_refused(name: str) -> None:
    with pytest.raises(PublishError, match="expected a name that the version does not use") as refused:
        read_files({name: b""})
    assert refused.value.path == name


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (3, "expected a Path, bytes, a str or a mapping, got int"),
        ({"dtype": object()}, "expected a mapping that JSON can say"),
        (Path("/nowhere/config.json"), "expected a file to copy, there is none at /nowhere"),
        ("a\udcff", "expected text, got characters that UTF-8 has not"),
        (__file__, r"expected the text of the file, got the path of one.*pass Path\("),
    ],
    ids=["number", "no JSON", "no file", "no characters", "a path as text"],
)
def test_what_is_no_content_is_refused_by_name(content: Any, expected: str) -> None:
    with pytest.raises(PublishError, match=expected) as refused:
        read_files({"config.json": content})
    assert refused.value.path == "config.json"


def test_something_else_than_a_mapping_is_refused() -> None:
    with pytest.raises(PublishError, match="expected files by name, got list"):
        read_files(["config.json"])  # type: ignore[arg-type]


def test_too_much_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", 10)
    (tmp_path / "large").write_bytes(b"12345")
    assert len(read_files({"a": tmp_path / "large", "b": b"12345"})) == 2
    with pytest.raises(PublishError, match="expected files of at most 10 bytes beside the weights, got at least 11"):
        read_files({"a": b"123456", "b": tmp_path / "large"})
    with pytest.raises(PublishError, match="got at least 11"):
        read_files({"a": tmp_path / "large", "b": "123456"})


def test_a_models_directory_is_taken_without_its_weights(tmp_path: Path) -> None:
    kept = ["chat_template.jinja", "config.json", "merges.txt", "modeling.py", "tokenizer.json", "tokenizer.model"]
    left_out = [
        *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
        *("consolidated.00.pth", "adapter_config.json", ".gitattributes"),
    ]
    for name in (*kept, *left_out):
        (tmp_path / name).write_text("{}")
    (tmp_path / "original").mkdir()
    found = model_files(tmp_path)
    assert list(found) == kept
    assert set(read_files(found).values()) == {b"{}"}


def test_a_directory_of_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"expected the directory of a model, with a config\.json"):
        model_files(tmp_path)
