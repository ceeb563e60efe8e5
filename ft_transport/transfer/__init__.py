"""Where ``state`` and ``http`` meet: this process's state is served, and a peer's is received.

``HTTPTransport`` composes a server and a client of this room; ``checkpoint`` takes its snapshots here, too.
"""
