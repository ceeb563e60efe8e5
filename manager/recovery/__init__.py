"""Recovers a replica's state from the memory of live peers or from the newest intact checkpoint.

The managers and the quorum import this package. The quorum chooses the peers.
"""
