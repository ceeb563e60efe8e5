"""Durable checkpoints: a snapshot gets to disk and back.

``CheckpointStore`` is the way in. Each rank's writer process writes its share of a save; loading reads chunks into
whatever layout a rank has. Which step a group saves, commits or loads is agreed on in ``coordination``.
"""
