"""The one tree of errors: it is as documented, and every error survives a process boundary whole."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest

import ft_transport
from ft_transport import errors
from ft_transport.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    DeadlineExceededError,
    EngineUnreachableError,
    FetchFailedError,
    IntegrityError,
    PeerAuthenticationError,
    PeerNotReadyError,
    PeerUnreachableError,
    RankFailedError,
    RankGoneError,
    SaveInProgressError,
    SnapshotLimitError,
    SnapshotReplacedError,
    StateMovedError,
    StepNotServedError,
    TransportError,
    WriterFailedError,
)
from manager.errors import ManagerError, QuorumError, RegistryError

HOSTILE = "said \x1b[2J\x07\r\u202e\x9b\ud800"
ESCAPED = r"said \x1b[2J\x07\r\u202e\x9b\ud800"


@pytest.mark.parametrize("kind", [TransportError, ManagerError, QuorumError, RegistryError])
def test_a_message_that_quotes_others_moves_and_hides_no_other_text(kind: Any) -> None:
    error = kind(HOSTILE)
    assert str(error) == ESCAPED
    assert str(pickle.loads(pickle.dumps(error))) == ESCAPED
    assert str(kind("one line\nanother one ×")) == "one line\nanother one ×"


CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TransportError)]


def example(cls: type[TransportError]) -> TransportError:
    where = {"peer": "node1:80", "step": 7}
    if cls is IntegrityError:
        return IntegrityError("chunk 3 was damaged", chunk=3, expected=1, actual=2**64 - 1, peer="node1:80", step=7)
    if cls is FetchFailedError:
        return FetchFailedError("nothing came", failures=(example(IntegrityError), PeerUnreachableError("x")), step=7)
    if cls is PeerNotReadyError:
        return PeerNotReadyError("not yet", retry_after_s=2.5, **where)  # type: ignore[arg-type]
    if cls is StepNotServedError:
        return StepNotServedError("another step", served=(8, 9), **where)  # type: ignore[arg-type]
    if cls is CheckpointDamagedError:
        return CheckpointDamagedError("a file", files=("rank-0.json",), step=7, path="model.weight")
    if cls is RankFailedError:
        return RankFailedError("it failed", rank=2, phase="write", cause_type="OSError", errno=28, step=7)
    if cls is RankGoneError:
        return RankGoneError("nobody came", ranks=(1, 3), step=7)
    return cls("expected this, got that", path="model.weight", **where)  # type: ignore[arg-type]


def fields_of(error: TransportError) -> dict[str, object]:
    return {**vars(error), "failures": tuple(map(str, getattr(error, "failures", ())))}


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_crosses_a_process_boundary(cls: type[TransportError]) -> None:
    for touched in (False, True):
        error = example(cls)
        error.destination_touched = touched
        pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)]
        for arrived in (*pickled, copy.copy(error), copy.deepcopy(error)):
            assert type(arrived) is cls
            assert str(arrived) == str(error)
            assert fields_of(arrived) == fields_of(error)
            assert arrived.destination_touched is touched


def test_the_text_says_what_and_where() -> None:
    for error in map(example, CLASSES):
        for field in ("peer", "step", "path"):
            value = getattr(error, field)
            assert value is None or f"{value}" in str(error)
        assert "NaN" not in str(error)
        error.destination_touched = True
        assert "NaN" in str(error)


def test_a_failed_fetch_lists_its_failures() -> None:
    text = str(example(FetchFailedError))
    assert "failure 1: chunk 3 was damaged: expected digest 0000000000000001, but the received bytes have f" in text
    assert "failure 2: x" in text


def documented_tree() -> dict[str, str]:
    """Child to parent, from the drawing in the module's docstring."""
    assert errors.__doc__ is not None
    tree: dict[str, str] = {}
    parents: list[str] = ["TransportError"]
    for line in errors.__doc__.splitlines():
        found = re.match(r"^([│ ]*)[├└]── (\w+)", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        tree[found[2]] = parents[depth]
        parents[depth + 1 :] = [found[2]]
    return tree


def test_the_tree_is_the_one_in_the_docstring() -> None:
    actual = {
        cls.__name__: next(base.__name__ for base in cls.__bases__ if issubclass(base, TransportError))
        for cls in CLASSES
        if cls is not TransportError
    }
    assert documented_tree() == actual


def test_every_error_is_in_the_facade() -> None:
    for cls in CLASSES:
        assert getattr(ft_transport, cls.__name__) is cls
        assert cls.__name__ in ft_transport.__all__


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (DeadlineExceededError, TimeoutError),
        (RankGoneError, TimeoutError),
        (CheckpointNotFoundError, LookupError),
        (PeerUnreachableError, ConnectionError),
        (errors.ConfigurationError, ValueError),
        (errors.ManifestError, ValueError),
        (errors.UnsupportedLeafError, TypeError),
    ],
)
def test_what_python_has_a_name_for_can_be_caught_by_it(cls: type[TransportError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
    with pytest.raises(builtin):
        raise example(cls)


def test_what_may_help_to_ask_again_says_so() -> None:
    retryable = {cls for cls in CLASSES if cls.retryable}
    assert retryable == {
        SnapshotLimitError,
        StateMovedError,
        IntegrityError,
        errors.MessageDamagedError,
        PeerUnreachableError,
        errors.PeerSilentError,
        PeerNotReadyError,
        SnapshotReplacedError,
        SaveInProgressError,
        WriterFailedError,
        EngineUnreachableError,
    }


def test_each_error_has_a_status_of_http() -> None:
    special = {
        errors.ConfigurationError: 400,
        PeerAuthenticationError: 401,
        StepNotServedError: 404,
        SnapshotReplacedError: 409,
        errors.StateNotServedError: 501,
        errors.ManifestError: 502,
        SnapshotLimitError: 503,
        StateMovedError: 503,
        PeerNotReadyError: 503,
    }
    assert {cls: cls.http_status for cls in CLASSES} == {cls: special.get(cls, 500) for cls in CLASSES}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 5 ü 重み", "step 5 ü 重み"),
        ("\x1b[2J\r\nforged", "\\x1b[2J\\r\\nforged"),
        ("a\u202eb\u2066c\u2028d\u200b", "a\\u202eb\\u2066c\\u2028d\\u200b"),
        ("\udcff\x00\x7f\x85", "\\udcff\\x00\\x7f\\x85"),
        ("x" * 100, "x" * 40 + "…"),
    ],
)
def test_text_from_a_peer_stays_in_its_line(text: str, shown: str) -> None:
    assert errors.escape_peer_text(text, max_characters=40) == shown


def test_a_path_that_a_peer_chose_stays_in_its_line() -> None:
    assert str(errors.RestoreError("expected a tensor", path="w\n\x1b[2Jforged")).isprintable()
