"""What is written for engines: other names, another dtype, and weights that are as complete as those before."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ft_transport import LoRAAdapter, Publisher, PublishError, WeightFormat


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "body.weight": torch.randn(6, 4, generator=generator),
        "body.turned": torch.randn(6, 4, generator=generator).t(),
        "body.count": torch.arange(3),
        "value.weight": torch.randn(4, generator=generator, dtype=torch.float64),
    }


def adapter(layer: str = "q") -> LoRAAdapter:
    names = (f"base_model.model.{layer}.lora_A.weight", f"base_model.model.{layer}.lora_B.weight")
    config = {"r": 4, "lora_alpha": 8, "target_modules": [layer]}
    return LoRAAdapter({name: torch.full((4, 4), 0.1) for name in names}, config)


def published(root: Path, value: Any, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a version of its own."""
    with Publisher([], root, weight_format=WeightFormat(**options)) as publisher:
        (file,) = publisher.publish(1, value).directory.glob("*.safetensors")
    return load_file(file)


class TestFormat:
    @pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
    def test_weights_of_microscaling_formats(self, tmp_path: Path, dtype: str) -> None:
        scales = torch.arange(64, dtype=torch.uint8).view(4, 16).view(getattr(torch, dtype))
        found = published(tmp_path, {"w": torch.ones(4), "w.scales": scales})
        assert (found["w.scales"].dtype, found["w.scales"].shape) == (scales.dtype, scales.shape)
        assert torch.equal(found["w.scales"].view(torch.uint8), scales.view(torch.uint8))

    def test_names_and_dtype_of_weights(self, tmp_path: Path) -> None:
        own = weights()
        names = {"body.weight": "model.weight", "value.weight": None}
        found = published(tmp_path, own, names=names, dtype=torch.bfloat16)
        assert found.keys() == {"model.weight", "body.turned", "body.count"}
        assert torch.equal(found["model.weight"], own["body.weight"].bfloat16())
        assert torch.equal(found["body.turned"], own["body.turned"].bfloat16())
        assert (found["model.weight"].dtype, found["body.count"].dtype) == (torch.bfloat16, torch.int64)
        assert own["body.weight"].dtype is torch.float32

    def test_tensors_in_one_memory_have_bytes_of_their_own(self, tmp_path: Path) -> None:
        table = torch.randn(8, 6)
        own = {"embedding": table, "head": table, "turned": table.t(), "rows": table[::2], "columns": table[:, 1:3]}
        found = published(tmp_path, own, dtype=torch.bfloat16)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in own.items())

    def test_names_and_dtype_of_an_adapter_which_stays_one_file(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float16, "max_shard_bytes": 1}
        found = published(tmp_path, adapter(), names=lambda name: name.replace(".q.", ".query."), **options)
        assert found.keys() == adapter("query").tensors.keys()
        assert {tensor.dtype for tensor in found.values()} == {torch.float16}

    @pytest.mark.parametrize(
        ("value", "options", "expected"),
        [
            (weights(), {"names": {"body.wieght": "a"}}, r"no rank has body\.wieght"),
            (weights(), {"names": {"body.weight": "body.count"}}, r"the new name body\.count"),
            (weights(), {"names": lambda _: None}, "a new name for at least one of 4 tensors, got None for all"),
            (adapter(), {"names": lambda name: name.replace("lora_", "")}, "expected the name of a LoRA matrix"),
            (
                {"weight": torch.ones(2).to(torch.float8_e4m3fn), "scale": torch.ones(1)},
                {"dtype": torch.bfloat16},
                r"publish quantized weights with dtype=None.*at weight",
            ),
        ],
        ids=["unknown", "twice", "nothing left", "no adapter", "quantized"],
    )
    def test_a_format_that_does_not_fit_is_refused(
        self, tmp_path: Path, value: Any, options: Any, expected: str
    ) -> None:
        with pytest.raises(PublishError, match=expected):
            published(tmp_path, value, **options)
        assert not list(tmp_path.glob("version-*"))


class TestFiles:
    @pytest.mark.parametrize("value", [weights(), adapter()], ids=["weights", "adapter"])
    def test_they_lie_beside_the_tensors_and_are_read_only(self, tmp_path: Path, value: Any) -> None:
        with Publisher([], tmp_path) as publisher:
            directory = publisher.publish(1, value, files={"config.json": {"a": 1}, "tokenizer.model": b"\0"}).directory
            assert json.loads((directory / "config.json").read_text()) == {"a": 1}
            assert (directory / "tokenizer.model").read_bytes() == b"\0"
            assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o444}
            # They belong to one version.
            later = publisher.publish(2, value).directory
            assert not (later / "config.json").exists()

    def test_a_file_that_is_refused_leaves_no_version(self, tmp_path: Path) -> None:
        with Publisher([], tmp_path) as publisher:
            with pytest.raises(PublishError, match=r"found none at .*missing.*config\.json"):
                publisher.publish(1, weights(), files={"config.json": tmp_path / "missing"})
            assert publisher.latest() is None
            publisher.publish(1, weights(), files={"config.json": {}})


class TestCompleteness:
    def test_weights_that_lack_names_of_the_version_before_are_refused(self, tmp_path: Path) -> None:
        less = weights()
        del less["body.turned"], less["value.weight"]
        with Publisher([], tmp_path) as publisher:
            publisher.publish(1, weights())
            expected = r"all names of version 1, .*missing: body\.turned, value\.weight;.*another root"
            with pytest.raises(PublishError, match=expected):
                publisher.publish(2, less)
            assert publisher.latest() == 1
            publisher.publish(2, {**weights(), "more": torch.ones(2)})
            with pytest.raises(PublishError, match=r"names of version 2.*missing: more"):
                publisher.publish(3, weights())
        with Publisher([], tmp_path) as another, pytest.raises(PublishError, match=r"missing: more"):
            another.publish(3, weights())

    def test_weights_of_several_files_are_compared_beyond_adapters(self, tmp_path: Path) -> None:
        with Publisher([], tmp_path, weight_format=WeightFormat(max_shard_bytes=1)) as publisher:
            publisher.publish(1, weights())
            # An adapter is whole by itself.
            publisher.publish(2, adapter())
            with pytest.raises(PublishError, match=r"names of version 1.*missing: body\.count"):
                publisher.publish(3, {"body.weight": torch.ones(2)})

    def test_what_is_left_out_on_purpose_is_published(self, tmp_path: Path) -> None:
        less = {"body.weight": torch.ones(2)}
        with Publisher([], tmp_path) as publisher:
            publisher.publish(1, weights())
            publisher.publish(2, less, missing_ok=True)
            publisher.publish(3, less)
            publisher.publish(4, weights())
            with pytest.raises(PublishError, match=r"names of version 4.*pass missing_ok=True"):
                publisher.publish(5, less)

    def test_a_version_before_that_was_damaged_holds_nobody_up(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Publisher([], tmp_path) as publisher:
            file = publisher.publish(1, weights()).directory / "model.safetensors"
            file.chmod(0o600)
            file.write_bytes(b"gone")
            with caplog.at_level(logging.WARNING):
                publisher.publish(2, {"head.weight": torch.ones(2)})
        assert "model.safetensors, so the new weights are not checked" in caplog.text
