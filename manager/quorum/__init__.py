"""Who takes part in a step: decisions (pure), the Lighthouse, heartbeats, and the ranks of one replica.

``Manager`` comes in. ``lighthouse`` is the only importer of torchft.
"""
