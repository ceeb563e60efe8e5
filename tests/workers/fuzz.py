"""Mutates well-formed inputs of everything that decodes what a peer or a disk says; by hand for long (`make fuzz`).

What must hold for each input: a value comes, or an error of ours; it takes no more time and memory than a multiple of
the input's length. An input whose outcome reads like none before it joins the corpus of the run, so that mutations go
on from there. What violates this is added to the kept corpus (``tests/property/corpus``), where the tests find it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import resource
import sys
import time
import tracemalloc
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import fuzz_targets
from mutations import Mutator

from ft_transport import TransportError

CORPUS: Final = Path(__file__).parents[1] / "property" / "corpus"
SPARE_S: Final = 0.25
S_PER_BYTE: Final = 100e-6
SPARE_BYTES: Final = 4 << 20
BYTES_PER_BYTE: Final = 64
MAX_GROWTH_BYTES: Final = 512 << 20
_MEASURED_EVERY: Final = 500
_MAX_NEW: Final = 2000
_BLOCK: Final = 500
_VARYING: Final = re.compile(r"\d+|'[^']*'|\"[^\"]*\"|\[.*|\$.*|b'.*")


@dataclass
class Outcome:
    """What came of one target."""

    num_seeds: int
    num_inputs: int = 0
    num_values: int = 0
    took_s: float = 0.0
    violations: dict[str, bytes] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)


def kept(target: str) -> list[bytes]:
    """The corpus that is kept, in order of the names."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def violation_of(target: str, data: bytes, *, is_measured: bool) -> tuple[str | None, str]:
    """What is wrong with what comes of an input, ``None`` if nothing is; and what came."""
    call = fuzz_targets.TARGETS[target].call
    if is_measured:
        tracemalloc.start()
    started_s = time.thread_time()
    try:
        call(data)
        came = "value"
    except TransportError as error:
        came = f"{type(error).__name__} {_VARYING.sub('', error.message[:160])}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}", "?"
    finally:
        took_s = time.thread_time() - started_s
        peak_bytes = 0
        if is_measured:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    if peak_bytes > SPARE_BYTES + BYTES_PER_BYTE * len(data):
        return f"{peak_bytes} bytes for an input of {len(data)}", came
    if took_s > SPARE_S + S_PER_BYTE * len(data) and not is_measured:
        return f"{took_s:.2f} s for an input of {len(data)} bytes", came
    return None, came


def fuzz(targets: Iterable[str], num_inputs: int, seed: int, *, deadline_s: float = float("inf")) -> dict[str, Outcome]:
    """So many inputs, divided among the targets in turns; fewer if the time on the monotonic clock comes first."""
    names = list(targets)
    corpora = {name: [*fuzz_targets.TARGETS[name].seeds, *kept(name)] for name in names}
    outcomes = {name: Outcome(len(corpus)) for name, corpus in corpora.items()}
    mutators = {name: Mutator(seed + number, fuzz_targets.TARGETS[name].words) for number, name in enumerate(names)}
    num_done = 0
    while num_done < num_inputs and time.monotonic() < deadline_s:
        for name in names:
            num = min(_BLOCK, num_inputs - num_done)
            _fuzz_block(name, outcomes[name], corpora[name], mutators[name], num)
            num_done += num
    return outcomes


def _fuzz_block(name: str, outcome: Outcome, corpus: list[bytes], mutator: Mutator, num_inputs: int) -> None:
    started_s = time.monotonic()
    for _ in range(num_inputs):
        data = mutator.of(corpus, outcome.num_seeds)
        outcome.num_inputs += 1
        violation, came = violation_of(name, data, is_measured=outcome.num_inputs % _MEASURED_EVERY == 0)
        if violation is not None and " s for an input" in violation:
            # A machine that stood still is no violation.
            violation, _ = violation_of(name, data, is_measured=False)
        if violation is not None:
            outcome.violations.setdefault(_VARYING.sub("", violation), data)
        elif came == "value":
            outcome.num_values += 1
        if came not in outcome.seen and len(outcome.seen) < _MAX_NEW:
            outcome.seen.add(came)
            corpus.append(data)
    outcome.took_s += time.monotonic() - started_s


def _write(name: str, data: bytes) -> Path:
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=1_000_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no longer than that")
    parser.add_argument("--targets", nargs="*", default=sorted(fuzz_targets.TARGETS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    fuzz(options.targets, 1000, seed)  # what is imported and kept
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started_s = time.monotonic()
    outcomes = fuzz(options.targets, options.num, seed, deadline_s=started_s + 60 * options.minutes)
    took_s = time.monotonic() - started_s
    num_inputs = sum(outcome.num_inputs for outcome in outcomes.values())
    grown_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes
    rate = num_inputs / took_s * 60 / 1e6
    print(
        f"seed {seed}: {num_inputs} inputs in {took_s:.0f} s, {rate:.2f} million a minute, {grown_bytes >> 20} MiB more"
    )
    for name, outcome in outcomes.items():
        share, each_s = 100 * outcome.num_values / outcome.num_inputs, outcome.num_inputs / outcome.took_s
        kinds = f"{len(outcome.seen)} kinds of outcome"
        print(f"  {name:12} {outcome.num_inputs:9} inputs, {share:5.1f} % values, {each_s:7.0f}/s, {kinds}")
    failed = grown_bytes > MAX_GROWTH_BYTES
    for name, outcome in outcomes.items():
        for violation, data in outcome.violations.items():
            failed = True
            print(f"VIOLATION of {name}: {violation}: {_write(name, data)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
