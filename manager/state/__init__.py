"""What belongs to one replica's state, and who may touch it: registry, lock, optimizer guard.

Every other room of the manager comes in. Nothing here knows a peer, a snapshot or a quorum.
"""
