"""When a snapshot is taken, what is copied at the step boundary, and what is shared until it changes.

The managers come in at each step boundary, the transport when a peer asks. Nothing here knows a quorum.
"""
