"""``ft-transport``, the command line: looks into jobs, replicas, files and checkpoints, for people and for scripts.

Nothing imports this room. It uses both packages as any user does, and may look behind their facades.
"""
