"""Durable checkpoints: a snapshot gets to disk and back.

``CheckpointStore`` is the way in. ``collective_write`` has the phases of a save, which ``publish`` uses for its
versions, too; each rank's writer process writes that rank's part. Loading reads chunks into whatever layout a rank has.
Which step a group saves, commits or loads is agreed on in ``coordination``.
"""
