"""What crosses the wire, and the decisions about it: pure values and functions.

The manifest of a snapshot, layouts, routes, slices, and the machines that say which connection fetches what next.
Every room above uses them. Nothing here does I/O, starts a thread, reads a clock or imports torch, so every failure
of a fetch is a unit test.
"""
