"""The job token becomes keys that sign, and is never seen."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from pathlib import Path

import pytest

from ft_transport.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Keys
from ft_transport.errors import ConfigurationError

SECRET = "correct-horse~battery/staple=="


def test_equal_tokens_verify_each_other_and_no_others() -> None:
    signature = Keys.of(SECRET).sign("manifest", b"ab", b"c")
    keys = Keys.of(SECRET)
    assert keys.verifies(signature, "manifest", b"ab", b"c")
    assert not keys.verifies(signature, "vote", b"ab", b"c")
    assert not keys.verifies(signature, "manifest", b"a", b"bc")
    assert not keys.verifies(signature, "manifest", b"abc")
    assert not Keys.of(SECRET + "x").verifies(signature, "manifest", b"ab", b"c")
    for other in (None, "", ":", signature[:-1], signature + "0", "é" + signature[1:], signature.replace(":", "")):
        assert not keys.verifies(other, "manifest", b"ab", b"c")


def test_while_the_token_is_replaced_both_verify_and_the_first_signs() -> None:
    old, both, new = Keys.of("old"), Keys.of("new old"), Keys.of("new")
    assert both.verifies(old.sign("vote"), "vote")
    assert new.verifies(both.sign("vote"), "vote")
    assert not old.verifies(both.sign("vote"), "vote")
    assert not new.verifies(old.sign("vote"), "vote")


def test_neither_token_nor_key_can_be_printed() -> None:
    keys = Keys.of(SECRET)
    [key] = keys.current()
    for thing in (keys, key, [key], copy.copy(key), key.derived("session")):
        assert SECRET not in f"{thing!r} {thing}"
        assert "secret" not in repr(thing)


@pytest.mark.parametrize("text", ["", " ", "\n", "one two three", "ü", "✓", "\x00", "nbsp\u00a0x", "esc\x1b"])
def test_what_is_no_token_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match="visible ASCII") as caught:
        Keys.of(text)
    assert not text.strip() or text not in str(caught.value)


def test_the_environment_names_a_token_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    assert Keys.from_environment() is None
    monkeypatch.setenv(TOKEN_VARIABLE, "")  # a secret that was not found
    with pytest.raises(ConfigurationError, match="got an empty value"):
        Keys.from_environment()
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    from_variable = Keys.from_environment()
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    with pytest.raises(ConfigurationError, match="both are set"):
        Keys.from_environment()
    monkeypatch.delenv(TOKEN_VARIABLE)
    from_file = Keys.from_environment()
    assert from_variable is not None
    assert from_file is not None
    assert from_file.verifies(from_variable.sign("vote"), "vote")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="nowhere"):
        Keys.from_environment()


def test_a_file_that_is_replaced_is_read_again_and_one_that_is_broken_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    keys = Keys.from_file(path)
    signed_before = keys.sign("vote")
    path.write_text("new\nold\n")
    now_s += 1
    assert Keys.of("new").verifies(keys.sign("vote"), "vote")
    assert keys.verifies(signed_before, "vote")
    for broken in ("", "a b c", "x" * 5000):
        path.write_text(broken)
        now_s += 1
        assert Keys.of("new").verifies(keys.sign("vote"), "vote")
    path.write_text("new\nold\n")
    now_s += 1
    caplog.clear()
    path.unlink()
    for _ in range(5):
        now_s += 1
        assert keys.verifies(signed_before, "vote")
    assert len(caplog.records) == 1
    assert "stays as it was" in caplog.text
    path.write_text("new")
    now_s += 1
    assert not keys.verifies(signed_before, "vote")
    path.unlink()
    now_s += 1
    keys.current()
    assert len(caplog.records) == 2, "it was well in between"


def test_a_pipe_in_place_of_the_file_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever opens a FIFO waits for a writer, here on a server's event loop."""
    path = tmp_path / "token"
    path.write_text("old")
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    keys = Keys.from_file(path)
    path.unlink()
    os.mkfifo(path)
    asking = threading.Thread(target=lambda: [keys.current(), keys.current()])
    now_s += 1
    asking.start()
    asking.join(0.5)
    was_held_up = asking.is_alive()
    with contextlib.suppress(OSError):  # nobody reads
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    asking.join()
    assert not was_held_up
    assert keys.verifies(Keys.of("old").sign("vote"), "vote")
    assert "stays as it was" in caplog.text
    for unusable in (path, tmp_path):
        with pytest.raises(ConfigurationError, match="regular file"):
            Keys.from_file(unusable)
