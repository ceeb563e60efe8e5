"""A replica's own store: one that does not come up at one port comes up at another, or the error says so."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from manager import QuorumError
from manager.quorum import replica_identity

TIMEOUT = timedelta(seconds=5)


class FailingStores:
    """Stands in for ``TCPStore``: the first ones fail as torch's do where nobody answers."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.store = object()

    def __call__(self, *_arguments: Any, **_keywords: Any) -> object:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise DistNetworkError("The client socket has timed out\nframe #0: c10d::TCPStore")
        return self.store


def test_another_port_is_tried_where_the_first_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = FailingStores(2)
    monkeypatch.setattr(replica_identity, "TCPStore", stores)
    assert replica_identity.own_store(TIMEOUT) is stores.store


def test_a_store_that_never_answers_is_an_error_of_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_identity, "TCPStore", FailingStores(100))
    with pytest.raises(
        QuorumError, match=r"own store to answer on localhost within 5 s, 3 times: The client socket"
    ) as caught:
        replica_identity.own_store(TIMEOUT)
    assert "frame #0" not in str(caught.value)
