"""Durable checkpoints: write a snapshot to disk, and load it again.

``CheckpointStore`` is the entry point. ``collective_write`` has the phases of a save, which ``publish`` also uses for
its versions; each rank's writer process writes that rank's part. A load reads chunks into any layout that a rank has.
``coordination`` lets the group agree on the step to save, commit or load.
"""
