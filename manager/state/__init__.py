"""What belongs to one replica's state, and who may touch it: registry, lock, optimizer guard.

Every other room of the manager comes in. Nothing here asks a peer, takes a snapshot or
knows a quorum.
"""
