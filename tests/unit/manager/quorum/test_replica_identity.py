"""A replica has a name of its own, and a store that comes up at another port where one does not answer."""

from __future__ import annotations

import os
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


def test_a_name_is_taken_once_and_not_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replica_identity.take_id("http://here:1", "replica_0")
    replica_identity.give_back_id(own)
    with monkeypatch.context() as context:
        pid = os.getpid()
        context.setattr(os, "getpid", lambda: pid + 1)
        assert replica_identity.take_id("http://here:1", "replica_0").replica_id != own.replica_id
    assert replica_identity.take_id("http://there:1", "replica_0").replica_id != own.replica_id
    assert replica_identity.take_id("http://here:1", "replica_1").replica_id != own.replica_id
    assert replica_identity.take_id("http://here:1", "replica_0") == own
    assert replica_identity.take_id("http://here:1", "replica_0") != own
