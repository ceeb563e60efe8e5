"""A fleet: hosts with links of limited rate; several sources, several receivers, deaths, and states that hardly differ.

It makes its own network, in namespaces, and removes it: only root can. All hosts share the cores of this machine: where
``cores in use`` is near 100 %, they were the limit, and not the links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from benchmarks import fleet_changes, fleet_deaths, fleet_fan_out, fleet_sources
from benchmarks.network_namespaces import why_not
from benchmarks.options import Benchmark, Options, Size
from benchmarks.replicas.fleet_hosts import NUM_TENSORS, FleetState
from benchmarks.report import Group

_NUM_BYTES: Final = 256 << 20
_SCENARIOS: Final[dict[str, Callable[[FleetState, Options], Group]]] = {
    fleet_fan_out.FAST.name: fleet_fan_out.FAST.run,
    fleet_fan_out.SLOW.name: fleet_fan_out.SLOW.run,
    "sources": fleet_sources.run,
    "deaths": fleet_deaths.run,
    "changes": fleet_changes.run,
}


def run(options: Options) -> Iterator[Group]:
    """Measures one scenario after the other."""
    reason = why_not()
    for name in options.states:
        if reason is not None:
            yield Group("fleet", name, "not measured", notes=[f"no network of its own: {reason}"])
            continue
        # Whole numbers of each tensor's elements.
        num_bytes = int(_NUM_BYTES * options.scale) // (4 * NUM_TENSORS) * 4 * NUM_TENSORS
        yield _SCENARIOS[name](FleetState("whole", num_bytes), options)


BENCHMARK: Final = Benchmark(
    name="fleet",
    question="How long until a fleet has the state, over real links?",
    run=run,
    states=tuple(_SCENARIOS),
    default=Size(scale=1.0, num_samples=3),
    misses={
        "16 receivers": "All hosts share two cores, and 16 receivers use 96 to 99 % of them.",
    },
)
