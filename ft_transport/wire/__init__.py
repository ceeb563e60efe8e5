"""The wire format, and the decisions of a fetch, as pure values and functions.

It contains the manifest of a snapshot, layouts, routes and slices, and the state machines that choose the next request
of each connection. All higher packages use it. Nothing here does I/O, starts a thread, reads a clock or imports torch,
so a unit test can reproduce every failure of a fetch.
"""
