"""Recovery of a replica, from the memory of live peers or from the newest good checkpoint.

The managers and the quorum import this package. ``quorum`` chooses the peers.
"""
