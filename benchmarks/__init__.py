"""Measurements, each beside its ceiling and its peers in the same run: ``python -m benchmarks --help``.

Each question is a module with a ``BENCHMARK``: `clone`, `fetch`, `reshard` (with `planning`), `stall`, `loop`, `heal`,
`checkpoint` (with `savers`), `reading`, `publishing`, `delta`. What it compares are variants, objects with a name and
a role; rounds go through all of them by turns. All questions share:

- `options`: sizes, and the alternating rounds;
- `report`: samples, medians with spread, ratios, verdicts; `tables` and `picture` show them;
- `machine`: timing with the share that other processes took, quiet, memory;
- `processes`: fresh processes; `replicas`: those that train;
- `ft_transport.cli.bench`, `transports`: what a figure is compared with; `states`, `layouts`: what is moved.
"""
