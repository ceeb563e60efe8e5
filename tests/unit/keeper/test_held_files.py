"""A keeper holds a dead trainer's files for its successor, and nobody else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from keepers import Notes, Trainer, is_alive, wait_until

from ft_transport.keeper.predecessor import Predecessor, find_predecessor
from ft_transport.runtime.unix_sockets import shared_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")


def find(slot: str, secret: bytes = b"") -> Predecessor:
    found: list[Predecessor | None] = []

    def is_found() -> bool:
        found.append(find_predecessor(shared_address(slot), secret))
        return found[-1] is not None

    wait_until(is_found)
    assert found[-1] is not None
    return found[-1]


def contents(predecessor: Predecessor) -> dict[int, tuple[bytes, bytes]]:
    """Number, description and content of the files, which are closed."""
    found = {}
    for held in predecessor.files:
        with held.file as file:
            file.seek(0)
            found[held.number] = held.about, file.read()
    return found


def test_a_successor_receives_the_held_files(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a", slot)
    trainer.run("hold('a', 1, b'one'); hold('a', 2, b'two')")
    trainer.kill()
    predecessor = find(slot)
    assert contents(predecessor) == {1: (b"about one", b"one"), 2: (b"about two", b"two")}
    keeper = int(notes.lines()[-1][2])
    predecessor.end()
    wait_until(lambda: not is_alive(keeper))


def test_a_file_is_not_offered_from_the_moment_it_was_dropped(start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a", slot)
    trainer.run("hold('a', 1, b'one'); hold('a', 2, b'two'); hold('a', 3, b'three')")
    trainer.send("hold('a', 2, b'again'); keeper.drop('a', 1); os.kill(os.getpid(), 9)")
    trainer.close()
    predecessor = find(slot)
    assert contents(predecessor) == {2: (b"about again", b"again"), 3: (b"about three", b"three")}
    predecessor.end()


def test_a_killed_keeper_is_replaced_with_its_files(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a", slot)
    trainer.run("hold('a', 1, b'one'); hold('a', 2, b'two'); keeper.drop('a', 1)")
    earlier = notes.wait_for("attended a")
    os.kill(earlier, signal.SIGKILL)
    wait_until(lambda: not is_alive(earlier))
    trainer.run("keeper.check()")
    trainer.kill()
    predecessor = find(slot)
    assert contents(predecessor) == {2: (b"about two", b"two")}
    predecessor.end()


def test_only_who_knows_the_secret_inherits(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a")
    trainer.run(f"attend(path, 'b', {slot!r}, b'secret'); hold('b', 1, b'one')")
    trainer.kill()
    wait_until(lambda: ["begun", "b"] in [line[:2] for line in notes.lines()])
    for secret in (b"", b"wrong", b"secret "):
        assert find_predecessor(shared_address(slot), secret) is None
    predecessor = find(slot, b"secret")
    assert contents(predecessor) == {1: (b"about one", b"one")}
    predecessor.end()


def test_the_successors_keeper_takes_over_in_one_step(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    start("a", slot).kill()
    notes.wait_for("attended a", "begun a")
    successor = start("b")
    successor.run(f"take_over(path, 'c', {slot!r}); hold('c', 1, b'one')")
    # The successor dies at once; its keeper may not even have started.
    successor.kill()
    predecessor = find_predecessor(shared_address(slot))
    assert predecessor is not None
    assert contents(predecessor) == {1: (b"about one", b"one")}
    assert ["ended", "a"] in [line[:2] for line in notes.lines()]
    predecessor.end()


def test_a_keeper_has_the_address_before_it_has_started(start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a")
    trainer.run("keeper = KeeperProcess()")
    trainer.send(f"attend(path, 'b', {slot!r}); hold('b', 1, b'one'); os.kill(os.getpid(), 9)")
    trainer.close()
    predecessor = find_predecessor(shared_address(slot))
    assert predecessor is not None
    assert contents(predecessor) == {1: (b"about one", b"one")}
    predecessor.end()


def test_a_second_trainer_does_not_get_the_address_of_a_first(start: Callable[..., Trainer], slot: str) -> None:
    first, second = start("a", slot), start("b")
    assert second.ask(f"keeper.listen('b', shared_address({slot!r}))") is False
    first.run("keeper.end('a')")
    assert second.ask(f"keeper.listen('b', shared_address({slot!r}))") is True


def test_held_files_are_closed_after_a_time(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a")
    keeper = notes.wait_for("attended a")
    address = shared_address(slot)
    trainer.run("from ft_transport.keeper.program import HOLDING; keeper.attend(Attend('b', HOLDING, b'0.05'))")
    trainer.run(f"keeper.listen('b', {address!r}); hold('b', 1, b'one'); keeper.end('a')")
    trainer.kill()
    wait_until(lambda: not is_alive(keeper))
    assert find_predecessor(address) is None


def test_a_duty_that_a_living_trainer_has_left_can_be_inherited(start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a", slot)
    trainer.run("hold('a', 1, b'one')")
    assert find_predecessor(shared_address(slot)) is None
    trainer.run("keeper.leave('a')")
    predecessor = find(slot)
    assert contents(predecessor) == {1: (b"about one", b"one")}
    predecessor.end()


def test_a_forked_child_of_the_successor_has_no_held_file(start: Callable[..., Trainer], slot: str) -> None:
    trainer = start("a", slot)
    trainer.run("hold('a', 1, b'one')")
    trainer.kill()
    predecessor = find(slot)
    opened = os.fstat(predecessor.files[0].file.fileno()).st_ino
    child = os.fork()
    if not child:
        inherited = [os.stat(each).st_ino for each in Path("/proc/self/fd").iterdir() if each.exists()]
        os._exit(int(opened in inherited))
    assert os.waitpid(child, 0)[1] == 0
    assert contents(predecessor) == {1: (b"about one", b"one")}
    predecessor.end()
