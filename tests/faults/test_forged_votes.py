"""Somebody writes to the key-value store in which the ranks vote."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from ranks_on_threads import groups_of, run_ranks
from torch.distributed import HashStore

from ft_transport.checkpoint import directory
from ft_transport.checkpoint.collective_write import CollectiveWrite
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.roots import DirectoryRoot
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.votes import Vote, encode, encode_all
from ft_transport.errors import PeerProtocolError, TransportError

LONG = timedelta(seconds=20)
OWN, PLANTED = b"/checkpoints/step-1", b"/planted"
BYTES = msgspec.msgpack.Decoder(bytes)


def _told(store: HashStore, token: str | None, rounds: int = 1) -> list[list[bytes] | TransportError]:
    """What two ranks take for the first one's decision, by rank; or why they do not."""
    agreements = [Agreement(group, "test", LONG) for group in groups_of(2, store, token)]

    def act(agreement: Agreement) -> list[bytes] | TransportError:
        try:
            return [agreement.value_of_first("choose", lambda: OWN, BYTES) for _ in range(rounds)]
        except TransportError as error:
            return error

    return run_ranks(*(lambda each=each: act(each) for each in agreements))  # type: ignore[misc]


def _planted() -> Sequence[Vote]:
    return [Vote(phase="choose", payload=msgspec.msgpack.encode(PLANTED)), Vote(phase="choose")]


def test_without_a_token_whoever_writes_to_the_store_decides() -> None:
    """Says what the token is for: what the next test refuses is believed without one, on one rank or on both."""
    store = HashStore()
    store.set("test/verdict/1", encode_all(_planted()).decode())
    first, second = _told(store, None)
    assert [PLANTED] in (first, second) or isinstance(second, PeerProtocolError)


def test_a_verdict_that_no_rank_signed_sends_nobody_elsewhere() -> None:
    store = HashStore()
    store.set("test/verdict/1", encode_all(_planted()).decode())
    told = _told(store, "right")
    assert all(isinstance(each, PeerProtocolError) for each in told)
    assert all("signed with the job token" in str(each) for each in told)


def test_a_vote_that_no_rank_signed_fails_the_phase_for_all() -> None:
    store = HashStore()
    store.set("test/vote/1/1", encode(Vote(phase="choose", payload=msgspec.msgpack.encode(PLANTED))))
    told = _told(store, "right")
    # The rank's own vote may have taken the place of the forged one in time.
    assert told == [[OWN], [OWN]] or all("signed with the job token" in str(each) for each in told)


@pytest.mark.parametrize("key", ["test/verdict/1", "test/vote/1/1"])
def test_what_an_earlier_run_decided_decides_nothing(key: str) -> None:
    earlier, store = HashStore(), HashStore()
    assert _told(earlier, "right") == [[OWN], [OWN]]
    store.set(key, earlier.get(key).decode("latin-1") if "verdict" in key else earlier.get(key))
    told = _told(store, "right")
    if "verdict" in key:
        assert all("own vote" in str(each) for each in told)
    else:  # the rank's own vote may have taken the place of the earlier one in time
        assert all(each == [OWN] or isinstance(each, TransportError) for each in told)


def test_a_rank_that_is_still_at_work_does_not_succeed_by_its_vote_of_an_earlier_run() -> None:
    earlier, store = HashStore(), HashStore()
    assert _told(earlier, "right", rounds=2) == [[OWN] * 2] * 2
    store.set("test/vote/2/1", earlier.get("test/vote/2/1"))
    first_is_done = threading.Event()

    def act(agreement: Agreement) -> str:
        agreement.run_on_all_ranks("begin", lambda: None)

        def work() -> None:
            if agreement.rank == 1:
                assert first_is_done.wait(LONG.total_seconds()), "its vote is there already"
                raise OSError("the disk is full")

        try:
            agreement.run_on_all_ranks("choose", work)
        except TransportError as error:
            return str(error)
        finally:
            if agreement.is_first:
                first_is_done.set()
        return "succeeded"

    agreements = [Agreement(group, "test", LONG) for group in groups_of(2, store, "right")]
    told = run_ranks(*(lambda each=each: act(each) for each in agreements))  # type: ignore[misc]
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    assert "earlier run" in told[0]


def test_signed_votes_are_all_that_is_needed() -> None:
    assert _told(HashStore(), "right", rounds=5) == [[OWN] * 5] * 2


def test_another_token_is_named() -> None:
    store = HashStore()
    groups = [groups_of(2, store, token)[rank] for rank, token in enumerate(["right", "wrong"])]
    agreements = [Agreement(group, "test", LONG) for group in groups]

    def act(agreement: Agreement) -> str:
        with pytest.raises(TransportError, match="job token") as caught:
            agreement.value_of_first("choose", lambda: OWN, BYTES)
        return str(caught.value)

    run_ranks(*(lambda each=each: act(each) for each in agreements))  # type: ignore[misc]


class _NoJob:
    """Has nothing to write."""

    def settings(self) -> dict[str, str]:
        return {}

    def admit(self, *, is_retry: bool) -> None:
        pass


def _agree(write: CollectiveWrite) -> None:
    with write.attempt(5):
        write.stage(_NoJob())  # type: ignore[arg-type]
        write.agree(5, _NoJob())  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [None, "right"])
def test_no_rank_writes_below_a_root_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    """The first rank names no directory: whatever it says, or whoever speaks for it, the others look into their own."""
    monkeypatch.setattr(directory, "_VISIBLE_S", 0.2)
    roots = [tmp_path / "first", tmp_path / "second"]
    writes = [
        CollectiveWrite(
            Agreement(group, "test", LONG), DirectoryRoot(NumberedDirectory(root, "step", None)), all_write=True
        )
        for group, root in zip(groups_of(2, HashStore(), token), roots, strict=True)
    ]

    def act(write: CollectiveWrite) -> str:
        with pytest.raises(TransportError, match="second") as caught:
            _agree(write)
        return str(caught.value)

    run_ranks(*(lambda each=each: act(each) for each in writes))  # type: ignore[misc]
    assert not roots[1].exists()
    assert list(roots[0].iterdir()) == []


@pytest.mark.parametrize("token", [None, "right"])
def test_a_place_that_somebody_else_names_is_written_to_by_nobody(tmp_path: Path, token: str | None) -> None:
    """One write into the store once had all ranks write there, and report success."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (elsewhere / "step-5.incomplete").mkdir(parents=True)
    (elsewhere / "step-5.incomplete" / ".marker").touch()
    store = HashStore()
    named = msgspec.msgpack.encode((str(elsewhere / "step-5.incomplete"), ".marker"))
    phase = "set up the directory"
    store.set("test/verdict/2", encode_all([Vote(phase=phase, payload=named), Vote(phase=phase)]).decode())
    writes = [
        CollectiveWrite(
            Agreement(group, "test", LONG), DirectoryRoot(NumberedDirectory(root, "step", None)), all_write=True
        )
        for group in groups_of(2, store, token)
    ]

    def act(write: CollectiveWrite) -> None:
        with pytest.raises(TransportError):
            _agree(write)

    run_ranks(*(lambda each=each: act(each) for each in writes))  # type: ignore[misc]
    assert [path.name for path in elsewhere.rglob("*")] == ["step-5.incomplete", ".marker"]
    assert not (root / "step-5").exists()
