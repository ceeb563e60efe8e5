"""Durable checkpoints: write a snapshot to disk, and load it again.

``CheckpointStore`` is the entry point. ``collective_write`` defines the phases of a save; ``publish`` writes its
versions in the same phases. Each rank has a writer process, which writes the rank's files. A load reads the saved bytes
into any layout of ranks. The ranks use ``coordination`` to agree on the step to save, commit or load.
"""
