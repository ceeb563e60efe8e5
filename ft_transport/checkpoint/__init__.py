"""Durable checkpoints: write a snapshot to disk, and load it again.

``CheckpointStore`` is the entry point. ``collective_write`` defines the phases of a save; ``publish`` writes its
versions in the same phases. A writer process beside each rank writes the part of that rank. A load reads the saved
bytes into any layout of ranks. Through ``coordination``, the ranks agree on the step to save, commit or load.
"""
