"""Mutated inputs give a value or an error of ours, in time and memory; and what once did not is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import fuzz
import fuzz_targets
import pytest
from fuzz_targets import TARGETS, Target

from ft_transport import ManifestError

pytestmark = [pytest.mark.filterwarnings("ignore")]

NUM_INPUTS = 12_000
KEPT = [(name, path.name) for name in sorted(TARGETS) for path in sorted((fuzz.CORPUS / name).glob("*"))]


# A part of a DTensor has its place on a mesh of processes, which are not there.
@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"table"}))
def test_inputs_that_are_well_formed_give_a_value(target: str) -> None:
    for seed in TARGETS[target].seeds[:1]:
        violation, came = fuzz.violation_of(target, seed, is_measured=False)
        assert violation is None
        assert came == "value"


@pytest.mark.parametrize(("target", "name"), KEPT)
def test_what_once_broke_something_does_not(target: str, name: str) -> None:
    violation, _ = fuzz.violation_of(target, (fuzz.CORPUS / target / name).read_bytes(), is_measured=False)
    assert violation is None


def test_mutated_inputs_break_nothing() -> None:
    seed = random.randrange(1 << 30)
    outcomes = fuzz.fuzz(sorted(TARGETS), NUM_INPUTS, seed)
    found = {name: list(outcome.violations.items()) for name, outcome in outcomes.items() if outcome.violations}
    assert not found, f"make fuzz ARGS='--num {NUM_INPUTS} --seed {seed}': {found}"


# ── the fuzzer itself finds what is planted ───────────────────────────────────────────────────────────────────────


def _without_a_type(data: bytes) -> object:
    if data.count(b"[") > 3:
        raise IndexError("planted")
    raise ManifestError("of ours")


def _slow(data: bytes) -> object:
    if b"[" in data:
        until_s = time.thread_time() + 2 * fuzz.SPARE_S + fuzz.S_PER_BYTE * len(data)
        while time.thread_time() < until_s:
            pass
    return None


def _large(data: bytes) -> object:
    return bytearray(2 * fuzz.SPARE_BYTES + fuzz.BYTES_PER_BYTE * len(data))


@pytest.mark.parametrize(
    ("call", "expected"),
    [(_without_a_type, "IndexError: planted"), (_slow, "s for an input"), (_large, "bytes for an")],
)
def test_what_is_planted_is_found(
    call: Callable[[bytes], object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fuzz_targets.TARGETS, "planted", Target(call, (b'["a",1]', b"[1,2]")))
    monkeypatch.setattr(fuzz, "_MEASURED_EVERY", 10)
    num_inputs = 200 if call is _without_a_type else 30
    if call is _slow:
        monkeypatch.setattr(fuzz, "SPARE_S", 0.005)
        monkeypatch.setattr(fuzz, "S_PER_BYTE", 0.0)
    outcome = fuzz.fuzz(["planted"], num_inputs, seed=5)["planted"]
    assert any(expected in violation for violation in outcome.violations)
