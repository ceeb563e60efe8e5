"""How much memory a newcomer makes ready: for optimizers that have not stepped yet, and for what is copied to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_tools import mesh_of
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from manager.quorum.healing import copied_bytes, missing_bytes

NUM = 10_000


@pytest.mark.parametrize(
    ("kind", "options", "share"),
    [
        (torch.optim.AdamW, {}, 2.0),
        (torch.optim.AdamW, {"amsgrad": True}, 3.0),
        (torch.optim.SGD, {"lr": 0.1}, 0.0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1.0),
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}, 2.0),
    ],
)
def test_as_much_as_the_first_step_makes(kind: type[Optimizer], options: dict[str, Any], share: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(NUM))
    made: Any = kind
    optimizer: Optimizer = made([parameter], **options)
    assert missing_bytes([optimizer]) == pytest.approx(share * parameter.nbytes, rel=0.01)
    assert not optimizer.state
    parameter.grad = torch.ones(NUM)
    optimizer.step()
    if share:
        assert missing_bytes([optimizer]) == 0


class NeedsMore(torch.optim.SGD):
    """One of the user's: nobody knows what making another one does."""


def test_an_optimizer_of_the_users_is_not_tried() -> None:
    assert missing_bytes([NeedsMore([torch.nn.Parameter(torch.zeros(NUM))], lr=0.1, momentum=0.9)]) == 0


def of_two_ranks(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh_of((2,), 0), [Shard(0)], run_check=False)


def test_of_a_sharded_parameter_the_part_of_this_rank_counts() -> None:
    parameter = torch.nn.Parameter(of_two_ranks(torch.zeros(NUM, 1)))
    assert missing_bytes([torch.optim.AdamW([parameter])]) == pytest.approx(2 * NUM * 4, rel=0.01)


def test_what_is_not_received_in_place_takes_memory_as_well() -> None:
    grid = torch.zeros(30, 40)
    content = {
        "in place": [grid, of_two_ranks(torch.zeros(30, 40))],
        "copied to": [torch.zeros(30, 40).t(), {"again": grid.t()}, of_two_ranks(torch.zeros(40, 30).t())],
        "nothing to copy": [torch.zeros(3, 3, device="meta").t(), torch.ones(3, 3).to_sparse(), 1],
    }
    assert copied_bytes(content) == 3 * grid.nbytes
