"""What a version contains: its format, the names of its tensors, and the files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from ft_transport import ConfigurationError, PublishError, WeightFormat, model_files
from ft_transport.publish import content as module
from ft_transport.publish.adapter import unwrapped
from ft_transport.publish.content import check_engine_names, engine_names, read_files


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"names": ["a"]}, "expected names to be a function or a mapping, got list"),
        ({"names": {"a": 3}}, "expected names to map each tensor name to a new name or None, got 'a': 3"),
        ({"names": {3: "a"}}, "expected names to map each tensor name to a new name or None, got 3: 'a'"),
        ({"dtype": torch.int8}, r"expected one of torch\.float64.* as dtype, got torch\.int8"),
        ({"dtype": torch.float8_e4m3fn}, r"as dtype, got torch\.float8_e4m3fn"),
        ({"dtype": "bfloat16"}, "as dtype, got 'bfloat16'"),
        ({"max_shard_bytes": 0}, "expected max_shard_bytes of at least 1, got 0"),
        ({"max_shard_bytes": "5GB"}, "expected a whole number as max_shard_bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(options: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        WeightFormat(**options)


def test_ranks_compare_tables_whatever_their_order_and_functions_not_at_all() -> None:
    table: dict[str, str | None] = {"a": "b", "c": None}
    stated = WeightFormat(names=table).stated()
    assert stated == WeightFormat(names={"c": None, "a": "b"}).stated()
    assert stated != WeightFormat(names={"a": "b", "c": "None"}).stated()
    assert WeightFormat(names=str.upper).stated() == WeightFormat(names=str.lower).stated() != stated


def test_a_table_that_changes_later_changes_nothing() -> None:
    table: dict[str, str | None] = {"a": "b"}
    chosen = WeightFormat(names=table)
    table["c"] = "d"
    assert chosen.names == {"a": "b"}


def test_names_lose_what_wraps_their_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = torch.compile(nn.ModuleDict({"body": torch.compile(model, backend="eager")}), backend="eager")
    assert list(unwrapped(wrapped.state_dict())) == ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PublishError, match=r"layer\.weight") as refused:
        unwrapped({"layer.weight": 1, "_orig_mod.layer.weight": 2})
    assert refused.value.path == "_orig_mod.layer.weight"


@pytest.mark.parametrize(
    "names",
    [{"a.w": "b.w", "value.w": None}, lambda name: None if name == "value.w" else name.replace("a.", "b.")],
    ids=["table", "function"],
)
def test_names_become_those_of_the_engine_and_none_leaves_out(names: Any) -> None:
    assert engine_names(["a.w", "c.w", "value.w"], names) == {"a.w": "b.w", "c.w": "c.w", "value.w": None}


@pytest.mark.parametrize(
    "names", [{"a": "c", "b": "c"}, {"a": "b"}, lambda _: "c"], ids=["table", "one that keeps its name", "function"]
)
def test_two_tensors_with_one_engine_name_are_refused(names: Any) -> None:
    with pytest.raises(PublishError, match=r"the new name .*, got a and") as refused:
        engine_names(["a", "b"], names)
    assert refused.value.path == "b"


@pytest.mark.parametrize("new", ["", 3, b"b"], ids=repr)
def test_what_is_no_name_is_refused(new: Any) -> None:
    with pytest.raises(PublishError, match="expected a name, or None to leave the tensor out, got") as refused:
        engine_names(["a"], lambda _: new)
    assert refused.value.path == "a"


def test_ranks_may_hold_different_tensors_of_one_table() -> None:
    table: dict[str, str | None] = {"a": "x", "b": "y", "c": None}
    check_engine_names([{"a": "x", "c": None}, {"b": "y", "a": "x"}], table)
    with pytest.raises(PublishError, match="only tensors of the trainer in the table of names, but no rank has b, c"):
        check_engine_names([{"a": "x"}, {"a": "x"}], table)


def test_ranks_whose_functions_say_otherwise_are_refused() -> None:
    with pytest.raises(PublishError, match="expected the same name on all ranks, got 'y' on rank 1 and 'x' on another"):
        check_engine_names([{"a": "x"}, {"a": "y"}], str.upper)
    with pytest.raises(PublishError, match="expected one tensor with the new name x, got a and"):
        check_engine_names([{"a": "x"}, {"b": "x"}], str.upper)


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
    with pytest.raises(PublishError, match="expected another file name") as refused:
        read_files({name: b""})
    assert refused.value.path == name


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (3, "expected a Path, bytes, a str or a mapping, got int"),
        ({"dtype": object()}, "expected a mapping that JSON can represent"),
        (Path("/nowhere/config.json"), "expected a file to copy, found none at /nowhere"),
        ("a\udcff", "expected text, got characters that UTF-8 cannot encode"),
        (__file__, r"expected the text of the file, got the path of a file; pass Path\("),
    ],
    ids=["number", "no JSON", "no file", "no characters", "a path as text"],
)
def test_what_is_no_content_is_refused_by_name(content: Any, expected: str) -> None:
    with pytest.raises(PublishError, match=expected) as refused:
        read_files({"config.json": content})
    assert refused.value.path == "config.json"


def test_something_else_than_a_mapping_is_refused() -> None:
    with pytest.raises(PublishError, match="expected a mapping from names to files, got list"):
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
    with pytest.raises(PublishError, match=r"expected the directory of a model, got one without config\.json"):
        model_files(tmp_path)
