"""``ft-transport``, the command line: what a job, a peer, a file or a checkpoint is about, for people and for scripts.

Nothing imports this room. It uses both packages as any user does, and may look behind their facades.
"""
