"""What a trainer calls its tensors, and what an engine calls them."""

import pytest
import torch
from torch import nn

from ft_transport import PublishError
from ft_transport.publish.names import unwrapped


def test_names_lose_what_wraps_their_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = torch.compile(nn.ModuleDict({"body": torch.compile(model, backend="eager")}), backend="eager")
    assert list(unwrapped(wrapped.state_dict())) == ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PublishError, match=r"layer\.weight") as refused:
        unwrapped({"layer.weight": 1, "_orig_mod.layer.weight": 2})
    assert refused.value.path == "_orig_mod.layer.weight"
