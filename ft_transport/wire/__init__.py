"""The wire format and the decisions of a fetch, as pure values and functions.

The manifest of a snapshot, layouts, routes, slices, and the state machines that choose the next request of each
connection. All packages above use them. Nothing here does I/O, starts a thread, reads a clock or imports torch, so
every failure of a fetch is a unit test.
"""
