"""Quorums: decisions (pure), the Lighthouse, heartbeats, and agreement between the ranks of one replica.

``Manager`` imports this package. ``lighthouse`` is the only importer of torchft.
"""
