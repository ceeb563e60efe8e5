"""The garbage collector is paused as long as anybody needs that, and is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from state_tools import file_of_state, receive

from ft_transport import register_encoding
from ft_transport.tensors import encodings
from ft_transport.tensors.collector import collector_paused


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_paused_until_the_last_one_ends() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_disabled_it_finds_it_disabled() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


class _Noting:
    """A leaf whose encoding notes whether the collector runs."""


def test_it_is_paused_while_a_state_is_taken_apart_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_by_type", {})
    monkeypatch.setattr(encodings, "_by_name", {})
    was_enabled: list[bool] = []

    def note(_value: object) -> object:
        was_enabled.append(gc.isenabled())
        return _Noting() if len(was_enabled) == 2 else None

    register_encoding(_Noting, name="test_collector.Noting", encode=note, decode=note)
    receive(file_of_state({"a": _Noting()}))
    assert was_enabled == [False, False]
    assert gc.isenabled()
