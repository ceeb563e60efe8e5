"""Quorums, on three levels: the decision (pure), the membership of one replica in its job, and its loop.

``Manager`` imports the loop. ``lighthouse`` is the only importer of torchft.
"""
