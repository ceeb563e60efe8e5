"""How much memory a newcomer makes ready for optimizers that have not stepped yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from manager.recovery.warm_join import missing_bytes

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
