"""How a replica comes back: from the memory of live peers, or from the newest good checkpoint.

The managers come in. Which peers to ask in a quorum is decided in ``quorum``.
"""
