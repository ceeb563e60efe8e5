"""What a version is to those who load it: ``transformers`` itself, from models that ``fully_shard`` has divided too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published_models as script
import pytest
import torch
from ranks import run_scenarios
from tiny_models import TOKENS, load, logits_of, tiny_llama

from ft_transport import Publisher, WeightFormat, model_files

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("peft")

# The libraries warn of each other's newest names.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_NUM_RANKS = 2


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank reported of all scenarios: starting the ranks takes longer than they do."""
    names = [each.__name__ for each in script.SCENARIOS]
    return run_scenarios(script.__file__, tmp_path_factory.mktemp("models"), _NUM_RANKS, *names)


class TestTransformers:
    @pytest.mark.parametrize(
        ("max_shard_bytes", "num_files"), [pytest.param(1 << 30, 1, id="one file"), pytest.param(6000, 5, id="shards")]
    )
    @pytest.mark.parametrize("is_tied", [False, True], ids=["head of its own", "tied"])
    def test_a_version_is_a_model_directory_with_the_trainers_logits_and_tokens(
        self, tmp_path: Path, max_shard_bytes: int, num_files: int, is_tied: bool
    ) -> None:
        model = tiny_llama(tie_word_embeddings=is_tied)
        model.config.save_pretrained(tmp_path / "base")
        (tmp_path / "base" / "tokenizer.json").write_text("{}")
        (tmp_path / "base" / "model.safetensors").write_text("not copied")
        weight_format = WeightFormat(max_shard_bytes=max_shard_bytes)
        with Publisher([], tmp_path / "versions", weight_format=weight_format) as publisher:
            files = model_files(tmp_path / "base")
            directory = publisher.publish(1, model.state_dict(), files=files).directory
        assert len(list(directory.glob("*.safetensors"))) == num_files
        assert (directory / "model.safetensors.index.json").exists() == (num_files > 1)
        assert (directory / "tokenizer.json").read_text() == "{}"
        loaded = load(directory)
        assert torch.equal(logits_of(loaded), logits_of(model))
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(loaded.generate(TOKENS, **options), model.generate(TOKENS, **options))

    def test_divided_weights_are_cast_and_read_beside_the_files_of_rank_0(self, ran: list[dict[str, Any]]) -> None:
        names = ["config.json", *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))]
        for report in ran:
            assert report["read_by_transformers"] == {
                "names": [*names, "model.safetensors.index.json"],
                "equals_the_trainer": True,
                "equals_the_untrained": False,
            }

    def test_an_adapter_of_a_divided_peft_model_is_what_peft_saves(self, ran: list[dict[str, Any]]) -> None:
        for report in ran:
            assert report["adapter_of_peft"] == {"names": True, "different": [], "loaded": True}


class TestTies:
    def test_every_name_of_tied_embeddings_is_in_the_files(self, ran: list[dict[str, Any]]) -> None:
        for report in ran:
            assert report["tied_embeddings"] == {"is_tied": True, "missing": [], "different": []}

    def test_memory_that_only_some_ranks_share_is_written_by_name(self, ran: list[dict[str, Any]]) -> None:
        for report in ran:
            assert report["tied_on_one_rank"] == {"missing": [], "different": []}


def test_what_ranks_are_told_differently_is_refused_on_all_of_them(ran: list[dict[str, Any]]) -> None:
    for report in ran:
        refused = report["refused_on_all_ranks"]
        assert "expected the same dtype on all ranks, got torch.float16 on rank 0" in refused["dtype"]
        assert "expected the same names on all ranks" in refused["table"]
        assert "PublishError: rank 0, plan" in refused["unknown"]
        assert "only tensors of the trainer in the table of names, but no rank has stage.2" in refused["unknown"]
        assert "expected one tensor with the new name model.layers.0" in refused["one_name"]
        assert "stage.1" in refused["one_name"]
        assert "expected the name of a file" in refused["files"]
        assert refused["known"] == "model.safetensors"
        assert refused["found"] == {"model.layers.0": [0.0] * 4, "model.layers.1": [1.0] * 4}
