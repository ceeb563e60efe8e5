"""Serves this process's state, and receives a peer's: connects ``state`` and ``http``.

``HTTPTransport`` composes a server and a client of this package; ``checkpoint`` takes its snapshots here, too.
"""
