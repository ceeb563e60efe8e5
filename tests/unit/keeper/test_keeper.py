"""A keeper does its duty when its trainer has died, however it died, and no sooner."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import kept_trainer
import pytest
from keepers import LONG_S, Notes, Trainer, is_alive, wait_until
from other_users import acting_as, as_root

from ft_transport.keeper.messages import End, Inherit, receive, send
from ft_transport.keeper.predecessor import Predecessor, find_predecessor
from ft_transport.keeper.process import KeeperProcess
from ft_transport.runtime.unix_sockets import shared_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")


@pytest.mark.parametrize(
    "death",
    [
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), 15)",
        "os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "sys.exit()",
        "raise ValueError",
        "os.killpg(0, 9)",  # as torchrun ends a worker
    ],
)
def test_a_duty_begins_however_the_trainer_ends(notes: Notes, start: Callable[..., Trainer], death: str) -> None:
    trainer = start("a")
    keeper = notes.wait_for("attended a")
    trainer.send(death)
    trainer.close()
    assert notes.wait_for("attended a", "begun a") == keeper
    assert is_alive(keeper)


def test_a_forked_child_that_lives_on_does_not_hide_the_death(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    trainer.run("fork(lambda: None)")
    notes.wait_for("attended a")
    trainer.kill()
    notes.wait_for("attended a", "begun a")


def test_the_keeper_exits_when_its_duties_are_over(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("over")
    keeper = notes.wait_for("attended over")
    trainer.kill()
    notes.wait_for("attended over", "begun over", "ended over")
    wait_until(lambda: not is_alive(keeper))


def test_the_keeper_exits_with_a_trainer_without_duties(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    trainer.run("keeper.end('a')")
    keeper = notes.wait_for("attended a", "ended a")
    trainer.kill()
    wait_until(lambda: not is_alive(keeper))
    notes.wait_for("attended a", "ended a")


def test_a_duty_can_begin_while_the_trainer_lives(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    trainer.run("keeper.begin('a')")
    notes.wait_for("attended a", "begun a")
    # The answer arrives when the duty has ended.
    trainer.run("keeper.end('a'); assert 'ended a' in open(path).read()")
    trainer.run("attend(path, 'a')")
    notes.wait_for("attended a", "begun a", "ended a", "attended a")
    trainer.kill()
    notes.wait_for("attended a", "begun a", "ended a", "attended a", "begun a")


def test_a_killed_keeper_is_replaced_with_its_duties(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    notes.wait_for("attended a")
    trainer.run("attend(path, 'b'); keeper.begin('b')")
    earlier = notes.wait_for("attended a", "attended b", "begun b")
    os.kill(earlier, signal.SIGKILL)
    wait_until(lambda: not is_alive(earlier))
    trainer.run("keeper.check()")
    noted = ["attended a", "attended b", "begun b", "attended a", "attended b", "begun b"]
    assert notes.wait_for(*noted) != earlier
    trainer.run("keeper.check(); assert len(open(path).readlines()) == 6")
    trainer.kill()
    notes.wait_for(*noted, "begun a")


def test_a_keeper_that_its_trainer_has_replaced_does_nothing(notes: Notes, start: Callable[..., Trainer]) -> None:
    """As one that did not answer, or whose connection the trainer's program has closed with all others."""
    trainer = start("a")
    keeper = notes.wait_for("attended a")
    trainer.run("os.close(keeper._connection.detach())")
    assert notes.wait_for("attended a", "ended a") == keeper
    wait_until(lambda: not is_alive(keeper))


def test_a_duty_that_is_over_is_not_done_again(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    trainer.run("attend(path, 'over'); keeper.begin('over')")
    earlier = notes.wait_for("attended a", "attended over", "begun over", "ended over")
    trainer.run("while 'over' in keeper._duties: keeper.check()")
    os.kill(earlier, signal.SIGKILL)
    wait_until(lambda: not is_alive(earlier))
    trainer.run("keeper.check()")
    notes.wait_for("attended a", "attended over", "begun over", "ended over", "attended a")


_EXITS = """
import atexit, sys
atexit.register(lambda: kept_trainer.keeper.begin("a"))
import kept_trainer
kept_trainer.attend(sys.argv[1], "a")
"""


def test_a_trainer_that_uses_its_keeper_while_it_exits_starts_no_second_one(notes: Notes) -> None:
    """A handler that was registered before the import runs after all others."""
    subprocess.run([sys.executable, "-W", "error", "-c", _EXITS, str(notes.path)], timeout=LONG_S, check=True)
    keeper = notes.wait_for("attended a", "begun a")
    # Had the exit handler started a second keeper, that one would have attended before the first one's death.
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not is_alive(keeper))
    notes.wait_for("attended a", "begun a")


def test_a_trainer_goes_on_without_a_keeper(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    keeper = KeeperProcess()
    monkeypatch.setattr(kept_trainer, "keeper", keeper)
    with caplog.at_level(logging.WARNING):
        kept_trainer.attend("unused", "a")
    assert "could not be started" in caplog.text
    keeper.begin("a")
    keeper.check()
    keeper.end("a")


def test_nobody_waits_for_the_keeper_to_close_the_trainers_output(notes: Notes) -> None:
    done = subprocess.run(
        [sys.executable, kept_trainer.__file__, str(notes.path), "a"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LONG_S,
        check=True,
    )
    assert done.stdout == b"ready\n"
    assert is_alive(notes.wait_for("attended a", "begun a"))


def test_the_keeper_has_no_descriptor_of_the_trainer(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    earlier = notes.wait_for("attended a")
    trainer.run("inherited = os.open(path, os.O_RDONLY); os.set_inheritable(inherited, True)")
    os.kill(earlier, signal.SIGKILL)
    wait_until(lambda: not is_alive(earlier))
    trainer.run("keeper.check()")
    keeper = notes.wait_for("attended a", "attended a")
    opened = [os.readlink(each) for each in Path(f"/proc/{keeper}/fd").iterdir()]
    assert str(notes.path) not in opened


def test_the_keeper_stays_small(notes: Notes, start: Callable[..., Trainer]) -> None:
    start("a")
    keeper = notes.wait_for("attended a")
    resident_bytes = int(Path(f"/proc/{keeper}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert resident_bytes < 40e6
    assert "torch" not in Path(f"/proc/{keeper}/maps").read_text()


def test_a_forked_child_has_a_keeper_of_its_own(notes: Notes, start: Callable[..., Trainer]) -> None:
    trainer = start("a")
    keeper = notes.wait_for("attended a")
    trainer.run("child = fork(lambda: attend(path, 'b'))")
    assert notes.wait_for("attended a", "attended b") != keeper
    trainer.run("os.kill(child, 9)")
    notes.wait_for("attended a", "attended b", "begun b")


def find(slot: str) -> Predecessor:
    predecessor = find_predecessor(shared_address(slot))
    assert predecessor is not None
    return predecessor


def test_a_successor_ends_the_duty_of_a_dead_trainer(
    notes: Notes, start: Callable[..., Trainer], slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start("a", slot)
    keeper = notes.wait_for("attended a")
    assert find_predecessor(shared_address(slot)) is None, "the trainer lives"
    trainer.kill()
    notes.wait_for("attended a", "begun a")
    with ExitStack() as closing:
        predecessor = find(slot)
        closing.callback(predecessor.close)
        assert predecessor.argument == f"{notes.path}|a".encode()
        with monkeypatch.context() as context:
            context.setattr("ft_transport.keeper.predecessor._START_S", 0.1)
            assert find_predecessor(shared_address(slot)) is None, "there is a successor already"
        predecessor.end()
        notes.wait_for("attended a", "begun a", "ended a")
        predecessor.end()
    wait_until(lambda: not is_alive(keeper))
    # The address is free again for the successor's own keeper.
    start("b", slot).kill()
    notes.wait_for("attended a", "begun a", "ended a", "attended b", "begun b")
    find(slot).end()


def test_the_duty_goes_on_if_the_successor_dies_too(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    start("a", slot).kill()
    notes.wait_for("attended a", "begun a")
    find(slot).close()

    def can_be_found() -> bool:
        predecessor = find_predecessor(shared_address(slot))
        if predecessor is not None:
            predecessor.end()
        return predecessor is not None

    # The keeper learns of the death of the successor a moment later.
    wait_until(can_be_found)
    notes.wait_for("attended a", "begun a", "ended a")


def test_a_successor_that_is_interrupted_can_end_the_duty_again(
    notes: Notes, start: Callable[..., Trainer], slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("a", slot).kill()
    notes.wait_for("attended a", "begun a")
    predecessor = find(slot)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr("ft_transport.keeper.messages.send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            predecessor.end()
    predecessor.end()
    notes.wait_for("attended a", "begun a", "ended a")


def test_a_signal_handler_may_use_the_keeper_that_it_has_interrupted(
    notes: Notes, start: Callable[..., Trainer]
) -> None:
    trainer = start("a")
    notes.wait_for("attended a")
    trainer.run("import signal; signal.signal(signal.SIGALRM, lambda *_: keeper.begin('a'))")
    # The alarm goes off while the keeper, which is stopped, is waited for.
    os.kill(int(notes.lines()[0][2]), signal.SIGSTOP)
    trainer.run("attend(path, 'b'); signal.setitimer(signal.ITIMER_REAL, 0.2); keeper.end('b')")
    os.kill(int(notes.lines()[0][2]), signal.SIGCONT)
    notes.wait_for("attended a", "attended b", "ended b", "begun a")


@as_root
def test_another_user_ends_no_duty(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    start("a", slot).kill()
    keeper = notes.wait_for("attended a", "begun a")
    address = shared_address(slot)
    with acting_as(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(LONG_S)
        connection.connect(address)
        with suppress(OSError):
            send(connection, End("a"))
        assert receive(connection) is None
    notes.wait_for("attended a", "begun a")
    assert is_alive(keeper)


def test_noise_does_not_stop_the_duty(notes: Notes, start: Callable[..., Trainer], slot: str) -> None:
    start("a", slot).kill()
    keeper = notes.wait_for("attended a", "begun a")
    for noise in (b"", b"\xff" * 100, b"\0" * 60_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(shared_address(slot))
            with suppress(OSError):
                connection.send(noise, socket.MSG_NOSIGNAL)
                connection.settimeout(LONG_S)
                assert receive(connection) is None
    assert is_alive(keeper)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(LONG_S)
        connection.connect(shared_address(slot))
        send(connection, Inherit())
        assert receive(connection) is not None
