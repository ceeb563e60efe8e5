"""What a version is to those who load it: ``transformers`` itself, from models that ``fully_shard`` has divided."""

from __future__ import annotations

from typing import Any

import published_models as script
import pytest
from checkpoint_ranks import run_scenarios

pytest.importorskip("transformers")

_NUM_RANKS = 2
_SCENARIOS = ("tied_embeddings", "tied_on_one_rank")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank reported of all scenarios: starting the ranks takes longer than they do."""
    return run_scenarios(tmp_path_factory.mktemp("models"), _NUM_RANKS, *_SCENARIOS, script=script.__file__)


class TestTies:
    def test_every_name_of_tied_embeddings_is_in_the_files(self, ran: list[dict[str, Any]]) -> None:
        for report in ran:
            assert report["tied_embeddings"] == {"is_tied": True, "missing": [], "different": []}

    def test_memory_that_only_some_ranks_share_is_written_by_name(self, ran: list[dict[str, Any]]) -> None:
        for report in ran:
            assert report["tied_on_one_rank"] == {"missing": [], "different": []}
